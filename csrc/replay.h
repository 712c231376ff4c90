// Replays a script of choices against the clock; for `benchmarks.decision_latency` only.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "policy.h"

namespace calrouter {

/// One request of a script: what is heard before it comes, and what it asks for.
struct Happening {
  std::optional<std::pair<std::int64_t, Message>> heard;  // rank, message
  Demand demand;
};

struct Replayed {
  std::vector<std::pair<std::size_t, std::size_t>> picks;  // prefill, decode rank
  std::vector<double> seconds;                             // of both picks together
};

/// Chooses and books a pair for every request; at most `under_way` requests are, the
/// oldest ends first. Only the two picks are timed. `all_new`: every engine counts as
/// changed before every choice.
inline Replayed replay(Table& table, Policy& prefill, Policy& decode,
                       const std::vector<Happening>& script, std::size_t under_way,
                       bool all_new) {
  using Clock = std::chrono::steady_clock;
  Replayed result;
  result.picks.reserve(script.size());
  result.seconds.reserve(script.size());
  std::deque<std::pair<std::int64_t, std::int64_t>> bookings;
  for (const Happening& next : script) {
    if (next.heard) table.hear(next.heard->first, next.heard->second);
    if (all_new) table.expire(next.demand.now_s);
    const auto began = Clock::now();
    const std::size_t p = prefill.pick(table, next.demand);
    const std::size_t d = decode.pick(table, next.demand);
    const std::chrono::duration<double> took = Clock::now() - began;
    result.picks.emplace_back(p, d);
    result.seconds.push_back(took.count());
    const auto prompt = static_cast<std::uint32_t>(next.demand.prompt_tokens);
    const auto output = static_cast<std::uint32_t>(next.demand.output_tokens);
    const double now_s = next.demand.now_s;
    const auto first = table.book(static_cast<std::int64_t>(p), Phase::Prefill, prompt, 1, 0,
                                  now_s, next.demand.due_s);
    const auto second =
        table.book(static_cast<std::int64_t>(d), Phase::Decode, prompt, output);
    bookings.emplace_back(first, second);
    if (bookings.size() > under_way) {
      table.release(bookings.front().first);
      table.release(bookings.front().second);
      bookings.pop_front();
    }
  }
  return result;
}

}  // namespace calrouter
