"""The two legs of every request: begin, hand over, end, abort.

No I/O and no event loop: the client (`client.py`) sends what this module returns and
feeds it what the engines answer.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)

from vllm_calrouter._core import Phase
from vllm_calrouter.options import FCFS, RouterOptions
from vllm_calrouter.placement import Choice, Limits, Placer, Pools, Prompt
from vllm_calrouter.predictors import Features, make_predictor
from vllm_calrouter.records import belongs_to
from vllm_calrouter.router import legs
from vllm_calrouter.router import wishes as wish
from vllm_calrouter.router.admission import Admission, RefusedError
from vllm_calrouter.router.deadlines import Deadlines
from vllm_calrouter.router.first_token import FirstToken
from vllm_calrouter.router.journey import Journey, Stage
from vllm_calrouter.router.metrics import RouterMetrics
from vllm_calrouter.router.wishes import Rules, Wishes

if TYPE_CHECKING:
    from asyncio import Future

    from vllm_calrouter.calibration import EngineCosts
    from vllm_calrouter.router.journal import Journal

logger = init_logger("vllm.calrouter")

#: Ways a prefill leg ends that leave a KV cache to read.
_PREFILLED = (FinishReason.LENGTH, FinishReason.STOP)

#: Ways a request ends that are not its output's own end.
_NOT_BY_ITSELF = ("abort", "error")

_NO_WISHES = Wishes()

#: Engines up to which every decision keeps its terms: about a microsecond each.
_ALWAYS_EXPLAINED = 64

#: Records of ended requests kept for `GET /router/decisions`.
_MOST_REMEMBERED = 500


class _Ended(NamedTuple):
    """What `Router.decisions` tells of a request; `finish` None: still under way."""

    journey: Journey
    at_s: float
    finish: str | None


class Router:
    """Routes the requests of one API server.

    Args:
        options: the router's options.
        engines: number of engines; ranks are 0 to engines - 1.
        index, count: which of how many API servers this is.
        first_token: when a prefill engine's token is sent to the client at once.
        costs, limits: of each engine, by rank (`Placer`).
        prefix_caching: whether the engines cache prompts.
        metrics, journal: where decisions are told; the journal may be None.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        options: RouterOptions,
        engines: int,
        *,
        index: int = 0,
        count: int = 1,
        first_token: FirstToken | None = None,
        costs: Sequence[EngineCosts] | None = None,
        limits: Sequence[Limits] | None = None,
        prefix_caching: bool = True,
        metrics: RouterMetrics | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.pools = Pools(engines, options.prefill)
        self.placer = Placer(
            options,
            self.pools,
            index=index,
            count=count,
            costs=costs,
            limits=limits,
            prefix_caching=prefix_caching,
            explain=journal is not None or engines <= _ALWAYS_EXPLAINED,
        )
        self.index = index
        #: No other router's, nor this one's after a restart.
        self.uid = uuid.uuid4().hex
        self.metrics = metrics
        self._first_token = first_token or FirstToken(enabled=options.first_token)
        self.predictor = make_predictor(options, index)
        self._rules = Rules(options)
        self._orders = not options.order == options.decode_order == FCFS
        self._deadlines = Deadlines(options, engines, costs)
        self._admission: Admission | None = None
        if options.admission is not None:
            self._admission = Admission(options, self.placer, count=count, clock=clock)
        self._numbers = itertools.count()
        self._ended: deque[_Ended] = deque(maxlen=_MOST_REMEMBERED)
        self._journal = journal
        self._clock = clock
        self._by_request: dict[str, Journey] = {}
        self._prefilling: dict[str, Journey] = {}
        self._release_turn = itertools.cycle(self.pools.ranks(Phase.DECODE))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def close(self) -> None:
        """Write out the journal; may be called any number of times."""
        if self._journal is not None:
            self._journal.close()

    def drop_expired(self) -> int:
        """Drop bookings that nobody released within their lease; how many.

        None should ever be there: it keeps a fault from counting for ever.
        """
        return self.placer.table.expire(self._clock())

    @property
    def requests_under_way(self) -> int:
        """Requests this router has begun and not yet seen end."""
        return len(self._by_request)

    def begin(
        self,
        request: EngineCoreRequest,
        *,
        vllm_rank: int | None = None,
        pair: tuple[int, int] | None = None,
        done: Future[str] | None = None,
    ) -> EngineCoreRequest:
        """Take a request on and return the first leg, with its rank set.

        Args:
            request: as the API server made it; not changed.
            vllm_rank: the engine vLLM itself chose for the whole request, where
                `leave_to_vllm` says that it should.
            pair: prefill and decode rank to use instead of the policy's choice.
            done: resolves when the request ends; its outputs are then kept from the
                API server (a warm-up).
        """
        if not self.pools.disaggregated:
            return self._begin_whole(request, None, vllm_rank)
        cause = legs.why_one_leg(request)
        if cause is not None:
            return self._begin_whole(request, cause, vllm_rank)
        wishes, features = self._features(request)
        predicted = self.predictor.predict(features)
        tokens = features.prompt_tokens
        bypass = self._first_token.why_not(request, wanted=wishes.first_token)
        deadline_s = self._deadlines.prefill_s(wishes, tokens, early=bypass is None)
        due_s = self._due_s(deadline_s)
        choice = self._choose(
            Phase.PREFILL,
            tokens,
            predicted,
            prompt=_prompt(request),
            slo_s=(wishes.ttft_s, wishes.tpot_s),
            given=("warm_up", pair[0]) if pair else None,
            due_s=due_s,
        )
        booking = self._book(choice, tokens, 1, due_s)
        leg = legs.prefill_leg(
            request,
            choice.rank,
            self._name(booking, 1, deadline_s),
            first_token=bypass is None,
        )
        journey = Journey(
            request=request,
            stage=Stage.PREFILL,
            leg_id=leg.request_id,
            began_s=self._clock(),
            prompt_tokens=tokens,
            predicted_tokens=predicted,
            wishes=wishes,
            features=features,
            predicted_by=self.predictor.source(features),
            choices=[choice],
            booking=booking,
            given_decode=("warm_up", pair[1]) if pair else None,
            bypass=bypass,
            done=done,
        )
        if bypass is None:
            journey.predict(journey.began_s)
        self._by_request[request.request_id] = journey
        self._prefilling[leg.request_id] = journey
        return leg

    def admit(self, wishes: Wishes) -> None:
        """Let a request in, before anything of it is done.

        Raises:
            RefusedError: it would wait longer than its class allows (`admission`).
        """
        if self._admission is None:
            return
        try:
            self._admission.check(wishes)
        except RefusedError:
            if self.metrics:
                self.metrics.refused(wishes.slo)
            raise

    def leave_to_vllm(self, request: EngineCoreRequest) -> bool:
        """Whether the choice of the engine is vLLM's own, not this router's."""
        if self.pools.disaggregated:
            return False
        pooling = request.pooling_params
        paired = pooling is not None and pooling.late_interaction_params is not None
        return paired or self.options.policy == "vllm"

    def _begin_whole(
        self, request: EngineCoreRequest, cause: str | None, vllm_rank: int | None
    ) -> EngineCoreRequest:
        wishes, features = self._features(request)
        tokens = features.prompt_tokens
        predicted = 0 if request.pooling_params else self.predictor.predict(features)
        phase = Phase.PREFILL if legs.ends_with_prefill(cause) else Phase.DECODE
        given = None
        if request.data_parallel_rank is not None:
            given = ("forced", request.data_parallel_rank)
        elif vllm_rank is not None:
            given = ("vllm", vllm_rank)
        due_s = self._due_s(wishes.ttft_s)
        choice = self._choose(
            phase,
            tokens,
            predicted,
            prompt=_prompt(request),
            slo_s=(wishes.ttft_s, wishes.tpot_s),
            given=given,
            due_s=due_s,
        )
        booking = self._book(choice, tokens, predicted, due_s)
        journey = Journey(
            request=request,
            stage=Stage.WHOLE,
            leg_id=request.request_id,
            began_s=self._clock(),
            prompt_tokens=tokens,
            predicted_tokens=predicted,
            wishes=wishes,
            features=features,
            predicted_by=self.predictor.source(features),
            choices=[choice],
            booking=booking,
            cause=cause,
        )
        journey.predict(journey.began_s)
        self._by_request[request.request_id] = journey
        if self.metrics and cause is not None:
            self.metrics.one_leg(cause)
        named = self._name(booking, predicted, wishes.ttft_s)
        return legs.one_leg(request, choice.rank, named)

    def _features(self, request: EngineCoreRequest) -> tuple[Wishes, Features]:
        """What a request wishes for, and what is known of its output beforehand."""
        params = request.sampling_params
        prompt = legs.prompt_tokens(request)
        if params is None:
            return _NO_WISHES, Features(prior_tokens=1, prompt_tokens=prompt)
        adapter = request.lora_request.lora_name if request.lora_request else None
        about = wish.about(params.extra_args)
        model = about.model or adapter
        try:
            wishes = self._rules.read(params.extra_args, model)
        except VLLMValidationError as error:
            # Only what came past `intake.py`: too late to refuse it.
            logger.warning_once("wishes ignored: %s", str(error))
            wishes = self._rules.defaults(model)
        wishes = self._rules.for_prompt(wishes, prompt)
        return wishes, Features(
            number=next(self._numbers),
            prior_tokens=self._rules.prior_tokens(model),
            prompt_tokens=prompt,
            min_tokens=params.min_tokens,
            max_tokens=params.max_tokens,
            hint_tokens=wishes.output_tokens,
            true_tokens=wish.truth(wishes, params),
            model=about.model,
            adapter=adapter,
            route=about.route,
            user=about.user,
            tools=about.tools,
            reasoning=about.reasoning,
            structured=params.structured_outputs is not None,
            stops=bool(params.stop),
        )

    def _choose(
        self,
        phase: Phase,
        prompt_tokens: int,
        output_tokens: int,
        *,
        slo_s: tuple[float | None, float | None],
        given: tuple[str, int] | None = None,
        prompt: Prompt | None = None,
        source_rank: int | None = None,
        due_s: float = math.inf,
    ) -> Choice:
        """Ask the policy, or take the rank that `given` (by whom, rank) names.

        `prompt`: to be computed there; `slo_s`: targets in seconds, from now to the
        first token and between tokens; `source_rank`: the engine that has the KV cache;
        `due_s`: when the leg should have ended.
        """
        if given is None:
            choice = self.placer.choose(
                phase,
                prompt_tokens,
                output_tokens,
                prompt=prompt,
                slo_ttft_s=slo_s[0] or 0.0,
                slo_tpot_s=slo_s[1] or 0.0,
                now_s=self._clock(),
                source_rank=source_rank,
                due_s=due_s,
            )
        else:
            choice = self.placer.given(given[0], phase, given[1], prompt)
        logger.debug("chose %s", choice)
        if self.metrics:
            self.metrics.decided(choice, timed=given is None)
        return choice

    def _due_s(self, left_s: float | None) -> float:
        """When a leg that has so long is due; infinite: whenever."""
        return math.inf if left_s is None else self._clock() + left_s

    def _book(
        self, choice: Choice, prompt: int, output: int, due_s: float = math.inf
    ) -> int:
        table = self.placer.table
        booking = table.book(
            choice.rank,
            choice.phase,
            prompt,
            output,
            cached_tokens=choice.cached_tokens,
            now_s=self._clock(),
            due_s=due_s,
        )
        self._tell_load(choice)
        return booking

    def _name(
        self, booking: int, output: int, deadline_s: float | None
    ) -> dict[str, Any]:
        """What a leg tells its engine of its booking (`messages.BOOKING`)."""
        named = {"router": self.uid, "booking": booking, "output_tokens": output}
        if self._orders:
            named["sent_s"] = self._clock()
            if deadline_s is not None:
                named["deadline_s"] = deadline_s
        return named

    def _release(self, journey: Journey) -> None:
        if journey.booking is None:
            return
        self.placer.table.release(journey.booking)
        journey.booking = None
        self._tell_load(journey.choices[-1])

    def _tell_load(self, choice: Choice) -> None:
        if self.metrics:
            legs_now = self.placer.table.legs(choice.rank, choice.phase)
            self.metrics.load(choice.phase, choice.rank, legs_now)

    def answered(self, outputs: EngineCoreOutputs) -> list[EngineCoreRequest]:
        """Take in one engine's answer and return the legs to send next.

        Removes from `outputs.outputs` what is not the API server's to see.
        """
        to_send: list[EngineCoreRequest] = []
        kept = []
        for output in outputs.outputs:
            journey = self._prefilling.get(output.request_id)
            if journey is None:
                passed = self._pass_on(output, to_send)
            else:
                passed = self._hand_over(journey, output, to_send)
            if passed is not None:
                kept.append(passed)
        outputs.outputs = kept
        for request_id in outputs.finished_requests or ():
            self._engine_dropped(request_id)
        return to_send

    def _pass_on(
        self, output: EngineCoreOutput, to_send: list[EngineCoreRequest]
    ) -> EngineCoreOutput | None:
        journey = self._by_request.get(output.request_id)
        if journey is None:
            return output
        if output.new_token_ids:
            journey.output_tokens += len(output.new_token_ids)
            journey.unread_kv = None
        if journey.first_token_s is None:
            journey.first_token_s = self._clock()
            if journey.stage is Stage.WHOLE:
                self._note_cached(journey, output)
        elif journey.sent_early:
            self._continue_early(journey, output)
        if output.prefill_stats is not None and journey.prefill_stats is not None:
            # What the prompt cost was decided where it ran: usage must not call a
            # transferred prompt a cached one.
            output.prefill_stats = journey.prefill_stats
        if output.finished:
            journey.last_finish = str(output.finish_reason)
            self._free_unread(journey, to_send)
            if not journey.request.resumable:
                self._end(journey, journey.last_finish)
        return output if journey.done is None else None

    def _hand_over(
        self,
        journey: Journey,
        output: EngineCoreOutput,
        to_send: list[EngineCoreRequest],
    ) -> EngineCoreOutput | None:
        """The prefill leg spoke: send the decode leg, or end the request."""
        if not output.finished:
            return None
        self._release(journey)
        del self._prefilling[journey.leg_id]
        journey.prefill_s = self._clock()
        journey.prefill_stats = output.prefill_stats
        self._note_cached(journey, output)
        journey.unread_kv = output.kv_transfer_params
        if journey.aborted:
            self._free_unread(journey, to_send)
            self._end(journey, "abort")
            return None
        if output.finish_reason not in _PREFILLED:
            return self._fail(journey, output)
        if journey.bypass is None:
            journey.bypass = _why_not_exact(journey)
        if journey.bypass is not None:
            self._tell_bypass(journey)
            to_send.append(self._begin_decode(journey))
            return None
        return self._send_early(journey, output, to_send)

    def _note_cached(self, journey: Journey, output: EngineCoreOutput) -> None:
        """How much of the prompt the engine had, and how much it was expected to."""
        stats = output.prefill_stats
        if stats is None:
            return
        journey.cached_tokens = stats.num_local_cached_tokens
        if self.metrics and journey.done is None:
            expected = journey.choices[0].cached_tokens
            self.metrics.prompt_cached(expected, journey.cached_tokens)

    def _tell_bypass(self, journey: Journey) -> None:
        cause = journey.bypass
        if self.metrics and journey.done is None and cause not in (None, "off"):
            self.metrics.first_token_bypassed(cause)

    def _send_early(
        self,
        journey: Journey,
        output: EngineCoreOutput,
        to_send: list[EngineCoreRequest],
    ) -> EngineCoreOutput | None:
        """Make the prefill leg's answer the request's first token."""
        journey.first_token_s = journey.prefill_s
        journey.output_tokens = len(output.new_token_ids)
        output.request_id = journey.request.request_id
        output.kv_transfer_params = None
        if self.metrics and journey.done is None:
            self.metrics.first_token_sent()
        # A stop string the API server finds again by itself, and says so.
        ended = self._first_token.ends(journey.request, output)
        if ended is not None:
            self._free_unread(journey, to_send)
            self._end(journey, str(ended))
        else:
            output.finish_reason = None
            to_send.append(self._begin_decode(journey, output.new_token_ids))
        return output if journey.done is None else None

    def _continue_early(self, journey: Journey, output: EngineCoreOutput) -> None:
        """The decode leg goes on from a first token that the client has already."""
        if journey.pause_s is None and output.new_token_ids:
            assert journey.first_token_s is not None
            journey.pause_s = self._clock() - journey.first_token_s
            if self.metrics and journey.done is None:
                self.metrics.paused(journey.pause_s)
        if output.events is not None:
            # vLLM would take the second queue for the first: a negative queue time.
            output.events = [
                event
                for event in output.events
                if event.type != EngineCoreEventType.QUEUED
            ]

    def _begin_decode(
        self, journey: Journey, first_token: list[int] | None = None
    ) -> EngineCoreRequest:
        if not journey.unread_kv:
            logger.warning(
                "prefill engine %d kept no KV cache of %s: its decode engine computes "
                "the prompt again",
                journey.choices[0].rank,
                journey.request.request_id,
            )
            if self.metrics:
                self.metrics.handover_without_kv()
        tokens, predicted = journey.prompt_tokens, journey.predicted_tokens
        slo_s = journey.targets_left_s(self._clock(), early=first_token is not None)
        choice = self._choose(
            Phase.DECODE,
            tokens,
            predicted,
            slo_s=slo_s,
            given=journey.given_decode,
            source_rank=journey.choices[0].rank if journey.unread_kv else None,
        )
        journey.choices.append(choice)
        journey.predict(self._clock())
        journey.stage = Stage.DECODE
        journey.leg_id = journey.request.request_id
        journey.booking = self._book(choice, tokens, predicted)
        journey.sent_early = first_token is not None
        named = self._name(journey.booking, predicted, slo_s[0])
        return legs.decode_leg(
            journey.request, choice.rank, named, journey.unread_kv, first_token
        )

    def _free_unread(self, journey: Journey, to_send: list[EngineCoreRequest]) -> None:
        """Free a KV cache that no decode leg has read."""
        if not journey.unread_kv:
            return
        rank = next(self._release_turn)
        to_send.append(legs.release_leg(journey.request, rank, journey.unread_kv))
        journey.unread_kv = None
        if self.metrics:
            self.metrics.kv_released()

    def _fail(
        self, journey: Journey, output: EngineCoreOutput
    ) -> EngineCoreOutput | None:
        """Tell the client that its prefill leg ended badly, in the engine's words."""
        self._end(journey, str(output.finish_reason))
        output.request_id = journey.request.request_id
        output.new_token_ids = []
        return output if journey.done is None else None

    def _engine_dropped(self, leg_id: str) -> None:
        """An engine is done with a leg; most were seen to finish already."""
        journey = self._prefilling.get(leg_id) or self._by_request.get(leg_id)
        if journey is not None and journey.leg_id == leg_id:
            ended = None if journey.aborted else journey.last_finish
            self._end(journey, ended or "abort")

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Mark requests as no longer wanted; returns the ids to abort in engines."""
        return [self._abort(request_id) for request_id in request_ids]

    def _abort(self, request_id: str) -> str:
        journey = self._by_request.get(request_id)
        if journey is None:
            return request_id
        if self.metrics and not journey.aborted:
            self.metrics.aborted(journey.stage.value)
        journey.aborted = True
        return journey.leg_id

    def still_wanted(self, leg: EngineCoreRequest) -> EngineCoreRequest:
        """What to send in a leg's place, if its client left while others were sent."""
        journey = self._by_request.get(leg.request_id)
        if journey is None or not journey.aborted or not journey.unread_kv:
            return leg
        instead: list[EngineCoreRequest] = []
        self._free_unread(journey, instead)
        self._end(journey, "abort")
        return instead[0]

    def not_sent(self, leg: EngineCoreRequest) -> EngineCoreOutput | None:
        """A leg could not be sent: end its request, and return what to tell of it."""
        leg_id = leg.request_id
        journey = self._prefilling.get(leg_id) or self._by_request.get(leg_id)
        if journey is None:
            return None
        self._end(journey, "error")
        return EngineCoreOutput(
            journey.request.request_id, [], finish_reason=FinishReason.ERROR
        )

    def _end(self, journey: Journey, finish: str) -> None:
        self._release(journey)
        del self._by_request[journey.request.request_id]
        self._prefilling.pop(journey.leg_id, None)
        if journey.done is not None:
            if not journey.done.done():
                journey.done.set_result(finish)
            return
        now_s = self._clock()
        if self._journal is not None:
            self._journal.write(journey.record(now_s, finish, self.index))
        if self._ended:
            # Of the last one, whoever ended it may still have to tell its client.
            self._ended[-1].journey.forget_request()
        self._ended.append(_Ended(journey, now_s, finish))
        if journey.request.sampling_params is not None:
            self._learn(journey, now_s - journey.began_s, finish)

    def _learn(self, journey: Journey, e2e_s: float, finish: str) -> None:
        """Compare what was predicted with what came of it."""
        produced = journey.output_tokens
        self.predictor.finished(journey.features, produced, finish)
        if self.metrics is None or finish in _NOT_BY_ITSELF or not produced:
            return
        self.metrics.output_predicted(
            journey.predicted_by, journey.predicted_tokens, produced
        )
        if journey.predicted_ttft_s is not None and journey.ttft_s:
            self.metrics.ttft_predicted(journey.predicted_ttft_s, journey.ttft_s)
        if journey.predicted_e2e_s is not None and e2e_s > 0:
            self.metrics.e2e_predicted(journey.predicted_e2e_s, e2e_s)

    def decisions(
        self, limit: int, request_id: str | None = None
    ) -> list[dict[str, Any]]:
        """Journal records from memory, oldest first.

        Args:
            limit: at most so many, the latest.
            request_id: only of this request (`records.belongs_to`), also if it is under
                way; its `finish` is then None.
        """
        told: Iterable[_Ended] = self._ended
        if request_id is not None:
            under_way = (
                _Ended(journey, self._clock(), None)
                for journey in self._by_request.values()
                if journey.done is None
            )
            told = (
                one
                for one in itertools.chain(self._ended, under_way)
                if belongs_to(one.journey.known_id, request_id)
            )
        latest = deque(told, maxlen=limit)
        return [one.journey.record(one.at_s, one.finish, self.index) for one in latest]


def _prompt(request: EngineCoreRequest) -> Prompt | None:
    """A prompt as prefix caches know it; None where they know it by more than ids, or
    are not asked."""
    params = request.sampling_params or request.pooling_params
    if request.prompt_token_ids is None or request.mm_features:
        return None
    if params is not None and params.skip_reading_prefix_cache:
        return None
    adapter = request.lora_request.lora_name if request.lora_request else None
    apart = (request.cache_salt, adapter)
    return Prompt(request.prompt_token_ids, 0 if apart == (None, None) else hash(apart))


def _why_not_exact(journey: Journey) -> str | None:
    """Why a prefill leg's token is not the text's next one, or None.

    Some models (state spaces, look-ahead) leave the end of the prompt to the decode
    engine; without a cache to read nothing tells what was computed.
    """
    computed = (journey.unread_kv or {}).get("remote_num_tokens")
    return None if computed == journey.prompt_tokens else "partial_prefill"
