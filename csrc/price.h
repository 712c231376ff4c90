// The price of serving a request on an engine, in seconds. Pure functions: no clock, no
// randomness. Formulas, symbols and their sources: docs/pricing.md.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "prefixes.h"
#include "table.h"

namespace calrouter {

/// What is known of a request when its engine is chosen. Targets are seconds from
/// `now_s` to the first token (below 0: overdue) and between tokens; 0: none.
struct Demand {
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;  // predicted
  std::int64_t cached_tokens = 0;  // of the prompt, on every engine already
  double slo_ttft_s = 0.0;
  double slo_tpot_s = 0.0;
  double now_s = 0.0;
  std::int64_t source_rank = kNowhere;  // the engine that has its KV cache
  const Prefixes* prefixes = nullptr;   // what is cached where; instead of the above
  double due_s = kNever;  // when this leg should have ended, on the clock of `now_s`

  static constexpr std::int64_t kNowhere = -1;
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  /// Tokens of the prompt that an engine has to compute.
  double uncached_tokens(std::size_t rank) const {
    const std::int64_t cached = prefixes ? prefixes->cached_tokens(rank) : cached_tokens;
    return static_cast<double>(prompt_tokens - cached);
  }
};

/// What a request meets on an engine at this moment.
struct Moment {
  double silence_s = 0.0;  // beyond what is normal
  double worked_s = 0.0;   // how long the engine has been at what it told of
  double uncached_tokens = 0.0;
  bool far = false;        // its KV cache comes from another host
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

/// What of an engine's price no request changes; made again when the engine's figures
/// do. Letters are those of docs/pricing.md.
struct Offer {
  double told_backlog_s = 0.0;            // of prefill_backlog_s, when it was told
  double unseen_backlog_s = 0.0;          // and what came after
  double prefill_base_s = 0.0;
  double prefill_per_token_s = 0.0;
  double prefill_per_token_sq_s = 0.0;
  double transfer_base_s[2] = {0.0, 0.0};       // on one host, between two
  double transfer_per_token_s[2] = {0.0, 0.0};
  double step_base_s = 0.0;               // of a step of n sequences without context
  double step_per_context_token_s = 0.0;
  double context_tokens = 0.0;            // C
  double batch_share = 1.0;               // n / (N + 1)
  double slot_use = 0.0;                  // a
  double mean_left_tokens = 0.0;          // R; 0: unknown
  double kv_tokens = 0.0;                 // K
  double kv_use_per_token = 0.0;          // 1 / capacity

  double prefill_s(double tokens) const {
    return prefill_base_s + prefill_per_token_s * tokens +
           prefill_per_token_sq_s * tokens * tokens;
  }
};

inline double number(std::int64_t count) { return static_cast<double>(count); }
inline double number(std::uint64_t count) { return static_cast<double>(count); }

/// Seconds to compute prompts of so many tokens, batched as far as a step allows.
inline double batched_prefill_s(const Engine& engine, double tokens, double tokens_sq) {
  const Costs& costs = engine.costs;
  const double steps = tokens / number(engine.limits.max_num_batched_tokens);
  return costs.prefill_base_s * steps + costs.prefill_per_token_s * tokens +
         costs.prefill_per_token_sq_s * tokens_sq;
}

/// Tokens of KV capacity, as told, else as calibrated.
inline double kv_capacity_tokens(const Engine& engine) {
  const double told =
      number(engine.message.kv_total_blocks) * number(engine.message.block_tokens);
  return told > 0.0 ? told : number(engine.costs.kv_capacity_tokens);
}

/// Tokens of KV that are taken, and will be by the sequences that wait for theirs: on a
/// decode engine those are taken to be as long as the running ones.
inline double kv_told_tokens(const Message& m, Serves serves) {
  const double taken = number(m.kv_total_blocks - m.kv_free_blocks);
  double tokens = taken * number(m.block_tokens) + number(m.prefill_tokens);
  if (serves == Serves::Decode && m.running > 0)
    tokens += number(m.waiting) * number(m.context_tokens) / number(m.running);
  return tokens;
}

/// `routers`: how many share the engines; each is taken to have as much unseen as this
/// one has.
inline Offer offer_of(const Engine& engine, const Account& own, Serves serves,
                      double routers) {
  const Message& m = engine.message;
  const Costs& costs = engine.costs;
  const Tally& prefill = own.unseen[0];
  const Tally& decode = own.unseen[1];
  double unseen = number(prefill.uncached_tokens);
  double unseen_sq = number(prefill.uncached_tokens_sq);
  if (serves == Serves::Both) {
    unseen += number(decode.uncached_tokens);
    unseen_sq += number(decode.uncached_tokens_sq);
  }
  const double sequences = number(m.running) + number(m.waiting) +
                           number(m.waiting_remote) +
                           routers * number(prefill.legs + decode.legs);
  const double slots = number(engine.limits.max_num_seqs);
  const double batch = std::min(sequences + 1.0, slots);
  const double output =
      number(m.output_tokens) + routers * number(decode.output_tokens);
  const double transfers = number(m.waiting_remote) + routers * number(decode.legs);

  Offer offer;
  // The lengths of the prompts that the engine told of are taken to be equal.
  const double told = number(m.prefill_tokens);
  const double told_sq = told * told / std::max(1.0, number(m.running + m.waiting));
  offer.told_backlog_s = batched_prefill_s(engine, told, told_sq);
  offer.unseen_backlog_s = batched_prefill_s(engine, routers * unseen, routers * unseen_sq);
  offer.prefill_base_s = costs.prefill_base_s;
  offer.prefill_per_token_s = costs.prefill_per_token_s;
  offer.prefill_per_token_sq_s = costs.prefill_per_token_sq_s;
  const double bytes = number(costs.kv_bytes_per_token);
  const double sharing = 1.0 + transfers;
  offer.transfer_base_s[0] = costs.transfer_base_s;
  offer.transfer_per_token_s[0] = bytes / costs.transfer_bytes_per_s * sharing;
  offer.transfer_base_s[1] = costs.far_transfer_base_s;
  offer.transfer_per_token_s[1] = bytes / costs.far_transfer_bytes_per_s * sharing;
  offer.step_base_s = costs.decode_base_s + costs.decode_per_seq_s * batch;
  offer.step_per_context_token_s = costs.decode_per_context_token_s;
  offer.context_tokens =
      number(m.context_tokens) + routers * number(decode.prompt_tokens);
  offer.batch_share = batch / (sequences + 1.0);
  offer.slot_use = (sequences + 1.0) / slots;
  offer.mean_left_tokens = sequences > 0.0 ? output / sequences : 0.0;
  offer.kv_tokens = kv_told_tokens(m, serves) +
                    routers * number(prefill.prompt_tokens + decode.prompt_tokens);
  offer.kv_use_per_token = 1.0 / kv_capacity_tokens(engine);
  return offer;
}

/// Seconds by which `expected_s` misses a target; 0 without one.
inline double excess_s(double expected_s, double target_s) {
  return target_s == 0.0 ? 0.0 : std::max(0.0, expected_s - target_s);
}

inline void price_prefill(const Offer& offer, const Demand& demand,
                          const Weights& weights, double uncached_tokens,
                          double backlog_s, Price& price) {
  const double prompt = number(demand.prompt_tokens);
  const double own = offer.prefill_s(uncached_tokens);
  const double kv_use = (offer.kv_tokens + prompt) * offer.kv_use_per_token;
  // What does not fit takes at least as long to go as it would take to compute.
  const double overflow_tokens =
      std::max(0.0, kv_use - 1.0) / offer.kv_use_per_token;
  price[kPrefillOwn] = own;
  price[kKvPressure] =
      weights.kv * own * kv_use * kv_use + overflow_tokens * offer.prefill_per_token_s;
  price[kSlo] = weights.slo * excess_s(backlog_s + own, demand.slo_ttft_s);
}

/// `before_s` is what passes before decode can begin.
inline void price_decode(const Offer& offer, const Demand& demand,
                         const Weights& weights, double before_s, Price& price) {
  const double prompt = number(demand.prompt_tokens);
  const double output = number(demand.output_tokens);
  const double context =
      (offer.context_tokens + prompt + 0.5 * output) * offer.batch_share;
  const double step = offer.step_base_s + offer.step_per_context_token_s * context;
  const double own = output * step;
  const double slot_use = offer.slot_use;
  const double kv_use = (offer.kv_tokens + prompt) * offer.kv_use_per_token;
  const double mean_left =
      offer.mean_left_tokens > 0.0 ? offer.mean_left_tokens : output;
  const double wait =
      std::max(0.0, std::max(slot_use, kv_use) - 1.0) * mean_left * step;
  price[kDecodeWait] = wait;
  price[kDecodeOwn] = own;
  price[kSlotPressure] = weights.slot * own * slot_use * slot_use;
  price[kKvPressure] = weights.kv * own * kv_use * kv_use;
  price[kSlo] = weights.slo * (excess_s(before_s + wait + step, demand.slo_ttft_s) +
                               output * excess_s(step, demand.slo_tpot_s));
}

/// The price of one engine's part in serving a request. `silence_s` beyond what is
/// normal counts in full: who was not heard of for so long may stay stuck as long again.
inline Price price_of(const Offer& offer, Serves serves, const Weights& weights,
                      const Demand& demand, const Moment& now) {
  Price price{};
  const double backlog_s =
      std::max(0.0, offer.told_backlog_s - now.worked_s) + offer.unseen_backlog_s;
  price[kPrefillBacklog] = backlog_s;
  price[kSilence] = now.silence_s;
  if (serves == Serves::Prefill) {
    price_prefill(offer, demand, weights, now.uncached_tokens, backlog_s, price);
    return price;
  }
  double before_s = 0.0;
  if (serves == Serves::Decode) {
    before_s = offer.transfer_base_s[now.far] +
               offer.transfer_per_token_s[now.far] * number(demand.prompt_tokens);
    price[kTransfer] = before_s;
  } else {
    before_s = offer.prefill_s(now.uncached_tokens);
    price[kPrefillOwn] = before_s;
  }
  price_decode(offer, demand, weights, backlog_s + before_s, price);
  return price;
}

/// The study's score in the same terms, as docs/pricing.md reads it. Its backlog is this
/// router's own open bookings, each in full until it ends.
inline Price paper_price_of(const Engine& engine, const Account& own, Serves serves,
                            const Weights& weights, const Demand& demand,
                            double uncached) {
  Price price{};
  const Costs& costs = engine.costs;
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
  const bool told = m.kv_total_blocks > 0;
  kv_tokens += told ? number(m.kv_total_blocks - m.kv_free_blocks) * number(m.block_tokens)
                    : number(own.open[0].prompt_tokens + own.open[1].prompt_tokens +
                             own.open[1].output_tokens);
  price[kKvPressure] = weights.kv * kv_tokens / kv_capacity_tokens(engine);
  return price;
}

}  // namespace calrouter
