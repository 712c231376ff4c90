// The price of serving a request on an engine, in seconds. Pure functions: no clock, no
// randomness. Formulas, symbols and their sources: docs/pricing.md.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "table.h"

namespace calrouter {

/// What is known of a request when its engine is chosen. Targets are seconds from
/// `now_s` to the first token (below 0: overdue) and between tokens; 0: none.
struct Demand {
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;  // predicted
  std::int64_t cached_tokens = 0;  // of the prompt, on the engine already
  double slo_ttft_s = 0.0;
  double slo_tpot_s = 0.0;
  double now_s = 0.0;
};

enum Term : std::size_t {
  kPrefillBacklog,
  kPrefillOwn,
  kTransfer,
  kDecodeWait,
  kDecodeOwn,
  kSlotPressure,
  kKvPressure,
  kSlo,
  kSilence,
  kTerms
};

inline constexpr const char* kTermNames[kTerms] = {
    "prefill_backlog_s", "prefill_own_s",  "transfer_s", "decode_wait_s", "decode_own_s",
    "slot_pressure_s",   "kv_pressure_s", "slo_s",      "silence_s"};

using Price = std::array<double, kTerms>;

inline double total_s(const Price& price) {
  double sum = 0.0;
  for (const double term : price) sum += term;
  return sum;
}

/// What the engines of a pool do for a request.
enum class Serves : std::uint8_t { Prefill, Decode, Both };

/// How much the terms count that are a choice and not a measurement.
struct Weights {
  double slot = 1.0;
  double kv = 1.0;
  double slo = 1.0;

  void check() const {
    // Negated, so that a NaN is refused.
    if (!(slot >= 0.0 && kv >= 0.0 && slo >= 0.0))
      throw std::invalid_argument("weights must be at least 0");
  }
};

/// An engine's load as it is priced: its last message, and what it cannot include yet.
struct Load {
  double prefill_tokens;     // Q
  double prefill_tokens_sq;  // sum of squares over those prompts
  double sequences;          // N
  double output_tokens;      // W, still to come
  double context_tokens;     // C
  double transfers;          // KV caches being read
  double kv_tokens;          // K, taken or about to be
  double kv_capacity_tokens;
};

/// `routers`: how many share the engines; each is taken to have as much unseen as this
/// one has.
inline Load load_of(const Engine& engine, const Account& own, Serves serves,
                    double routers) {
  const Message& m = engine.message;
  const Tally& prefill = own.unseen[0];
  const Tally& decode = own.unseen[1];
  const auto number = [](auto count) { return static_cast<double>(count); };
  const double told = number(m.prefill_tokens);
  double unseen = number(prefill.uncached_tokens);
  double unseen_sq = number(prefill.uncached_tokens_sq);
  if (serves == Serves::Both) {
    unseen += number(decode.uncached_tokens);
    unseen_sq += number(decode.uncached_tokens_sq);
  }
  Load load;
  load.prefill_tokens = told + routers * unseen;
  load.prefill_tokens_sq =
      told * told / std::max(1.0, number(m.running + m.waiting)) + routers * unseen_sq;
  load.sequences = number(m.running) + number(m.waiting) + number(m.waiting_remote) +
                   routers * number(prefill.legs + decode.legs);
  load.output_tokens = number(m.output_tokens) + routers * number(decode.output_tokens);
  load.context_tokens =
      number(m.context_tokens) + routers * number(decode.prompt_tokens);
  load.transfers = number(m.waiting_remote) + routers * number(decode.legs);
  const double block = number(m.block_tokens);
  load.kv_tokens = (number(m.kv_total_blocks) - number(m.kv_free_blocks)) * block + told +
                   routers * number(prefill.prompt_tokens + decode.prompt_tokens);
  if (serves == Serves::Decode && m.running > 0)
    load.kv_tokens += number(m.waiting) * number(m.context_tokens) / number(m.running);
  const double told_capacity = number(m.kv_total_blocks) * block;
  load.kv_capacity_tokens =
      told_capacity > 0.0 ? told_capacity : number(engine.costs.kv_capacity_tokens);
  return load;
}

/// Seconds until the prompts ahead are computed, batched as far as the step allows.
inline double prefill_backlog_s(const Load& load, const Engine& engine) {
  const Costs& costs = engine.costs;
  const double steps =
      load.prefill_tokens / static_cast<double>(engine.limits.max_num_batched_tokens);
  return costs.prefill_base_s * steps + costs.prefill_per_token_s * load.prefill_tokens +
         costs.prefill_per_token_sq_s * load.prefill_tokens_sq;
}

/// Seconds by which `expected_s` misses a target; 0 without one.
inline double excess_s(double expected_s, double target_s) {
  return target_s == 0.0 ? 0.0 : std::max(0.0, expected_s - target_s);
}

inline void price_prefill(const Load& load, const Engine& engine, const Demand& demand,
                          const Weights& weights, Price& price) {
  const Costs& costs = engine.costs;
  const double prompt = static_cast<double>(demand.prompt_tokens);
  const double own = costs.prefill_s(prompt - static_cast<double>(demand.cached_tokens));
  const double backlog = price[kPrefillBacklog];
  const double use = (load.kv_tokens + prompt) / load.kv_capacity_tokens;
  const double overflow_tokens = std::max(0.0, use - 1.0) * load.kv_capacity_tokens;
  price[kPrefillOwn] = own;
  price[kKvPressure] =
      weights.kv * own * use * use + overflow_tokens * costs.prefill_per_token_s;
  price[kSlo] = weights.slo * excess_s(backlog + own, demand.slo_ttft_s);
}

/// Adds decode's terms to `price`; `before_s` is what passes before decode can begin.
inline void price_decode(const Load& load, const Engine& engine, const Demand& demand,
                         const Weights& weights, double before_s, Price& price) {
  const Costs& costs = engine.costs;
  const double prompt = static_cast<double>(demand.prompt_tokens);
  const double output = static_cast<double>(demand.output_tokens);
  const double slots = static_cast<double>(engine.limits.max_num_seqs);
  const double sequences = load.sequences + 1.0;
  const double batch = std::min(sequences, slots);
  const double context =
      (load.context_tokens + prompt + 0.5 * output) * (batch / sequences);
  const double step = costs.step_s(batch, context);
  const double own = output * step;
  const double slot_use = sequences / slots;
  const double kv_use = (load.kv_tokens + prompt) / load.kv_capacity_tokens;
  const bool lengths_known = load.sequences > 0.0 && load.output_tokens > 0.0;
  const double mean_left =
      lengths_known ? load.output_tokens / load.sequences : output;
  const double wait =
      std::max(0.0, std::max(slot_use, kv_use) - 1.0) * mean_left * step;
  price[kDecodeWait] = wait;
  price[kDecodeOwn] = own;
  price[kSlotPressure] = weights.slot * own * slot_use * slot_use;
  price[kKvPressure] = weights.kv * own * kv_use * kv_use;
  price[kSlo] = weights.slo * (excess_s(before_s + wait + step, demand.slo_ttft_s) +
                               output * excess_s(step, demand.slo_tpot_s));
}

/// Seconds of silence beyond what is normal: an engine not heard of for so long may
/// stay stuck as long again. One never heard of has nothing to be silent about.
inline double silence_beyond_s(const Engine& engine, const Patience& patience,
                               double now_s) {
  if (!engine.heard) return 0.0;
  return std::max(0.0, engine.silence_s(now_s) - patience.stale_s);
}

/// The price of one engine's part in serving a request.
inline Price price_of(const Engine& engine, const Account& own, const Patience& patience,
                      Serves serves, double routers, const Weights& weights,
                      const Demand& demand) {
  Price price{};
  const Load load = load_of(engine, own, serves, routers);
  const double backlog = prefill_backlog_s(load, engine);
  price[kPrefillBacklog] = backlog;
  if (serves == Serves::Prefill) {
    price_prefill(load, engine, demand, weights, price);
  } else if (serves == Serves::Decode) {
    price[kTransfer] = engine.costs.transfer_s(static_cast<double>(demand.prompt_tokens),
                                               load.transfers);
    price_decode(load, engine, demand, weights, backlog + price[kTransfer], price);
  } else {
    const double uncached =
        static_cast<double>(demand.prompt_tokens - demand.cached_tokens);
    price[kPrefillOwn] = engine.costs.prefill_s(uncached);
    price_decode(load, engine, demand, weights, backlog + price[kPrefillOwn], price);
  }
  price[kSilence] = silence_beyond_s(engine, patience, demand.now_s);
  return price;
}

/// The study's score in the same terms, as docs/pricing.md reads it. Its backlog is this
/// router's own open bookings, each in full until it ends.
inline Price paper_price_of(const Engine& engine, const Account& own, Serves serves,
                            const Weights& weights, const Demand& demand) {
  Price price{};
  const Costs& costs = engine.costs;
  const auto number = [](auto count) { return static_cast<double>(count); };
  const double uncached = number(demand.prompt_tokens - demand.cached_tokens);
  double kv_tokens = number(demand.prompt_tokens);
  if (serves != Serves::Decode) {
    for (std::size_t phase = 0; phase < (serves == Serves::Both ? 2 : 1); ++phase) {
      const Tally& open = own.open[phase];
      price[kPrefillBacklog] += costs.prefill_base_s * number(open.legs) +
                                costs.prefill_per_token_s * number(open.uncached_tokens) +
                                costs.prefill_per_token_sq_s *
                                    number(open.uncached_tokens_sq);
    }
    price[kPrefillOwn] = costs.prefill_s(uncached);
    if (demand.slo_ttft_s > 0.0)
      price[kSlo] += price[kPrefillBacklog] *
                     std::min(1.0, price[kPrefillOwn] / demand.slo_ttft_s);
  }
  if (serves != Serves::Prefill) {
    const double per_token = costs.step_s(1.0, 0.0);
    price[kDecodeWait] = per_token * number(own.open[1].output_tokens);
    price[kDecodeOwn] = per_token * number(demand.output_tokens);
    kv_tokens += number(demand.output_tokens);
    if (demand.slo_tpot_s > 0.0)
      price[kSlo] += price[kDecodeWait] * std::min(1.0, per_token / demand.slo_tpot_s);
  }
  price[kSlo] *= weights.slo;
  const Message& m = engine.message;
  const double told_capacity = number(m.kv_total_blocks) * number(m.block_tokens);
  const bool told = told_capacity > 0.0;
  kv_tokens += told ? number(m.kv_total_blocks - m.kv_free_blocks) * number(m.block_tokens)
                    : number(own.open[0].prompt_tokens + own.open[1].prompt_tokens +
                             own.open[1].output_tokens);
  price[kKvPressure] = weights.kv * kv_tokens /
                       (told ? told_capacity : number(costs.kv_capacity_tokens));
  return price;
}

}  // namespace calrouter
