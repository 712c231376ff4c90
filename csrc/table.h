// The load table: what one router has booked on each engine, what the engines last
// said of themselves, and what work costs there. No Python, no clock, no I/O.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "costs.h"
#include "ledger.h"

namespace calrouter {

/// What an engine says of itself: tokens, sequences, blocks. `waiting` does not include
/// `waiting_remote`, whose KV blocks are taken and whose KV is still to come.
struct Message {
  std::int64_t incarnation = 0;
  std::int64_t sequence = 0;
  std::int64_t booking_seen = 0;
  std::int64_t prefill_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t context_tokens = 0;
  std::int64_t running = 0;
  std::int64_t waiting = 0;
  std::int64_t waiting_remote = 0;
  std::int64_t kv_total_blocks = 0;
  std::int64_t kv_free_blocks = 0;
  std::int64_t kv_pinned_blocks = 0;
  std::int64_t block_tokens = 0;
  double now_s = 0.0;  // when it was heard
};

/// What vLLM's own balancer is told: requests, requests, fraction of KV blocks in use.
struct Counts {
  std::int64_t waiting = 0;
  std::int64_t running = 0;
  double kv_usage = 0.0;
};

struct Engine {
  Message message;
  bool heard = false;
  bool has_costs = false;
  Costs costs;
  Limits limits;
  Counts counts;
  std::int64_t retired_incarnation = 0;
  bool restarted = false;

  /// Seconds since the last message; infinite when there was none.
  double silence_s(double now_s) const {
    if (!heard) return std::numeric_limits<double>::infinity();
    return std::max(0.0, now_s - message.now_s);
  }
};

/// How long things may last, in seconds.
struct Patience {
  /// A booking older than this is dropped by `expire`. Longer than any request should
  /// last: it only mends a release that was lost.
  double lease_s = 3600.0;
  /// Beyond this an engine's silence is added to its price.
  double stale_s = 1.0;
  /// Beyond this an engine is not chosen, unless all are silent so long.
  double dead_s = 10.0;

  void check() const {
    if (!(stale_s >= 0.0)) throw std::invalid_argument("stale_s must be at least 0");
    if (!(dead_s >= stale_s))
      throw std::invalid_argument("dead_s must be at least stale_s");
  }
};

class Table {
 public:
  explicit Table(std::size_t engines, const Patience& patience = {})
      : ledger_(engines, patience.lease_s), engines_(engines), patience_(patience) {
    patience.check();
  }

  std::size_t engines() const { return engines_.size(); }
  const Patience& patience() const { return patience_; }
  const Engine& engine(std::int64_t rank) const { return engines_[checked(rank)]; }
  const Account& account(std::int64_t rank) const {
    return ledger_.account(checked(rank));
  }

  /// For loops over ranks that were checked before.
  const Engine& engine_at(std::size_t rank) const { return engines_[rank]; }
  const Account& account_at(std::size_t rank) const { return ledger_.account(rank); }

  /// Own legs under way on an engine, of both phases.
  std::int64_t in_flight(std::int64_t rank) const {
    const Account& own = account(rank);
    return own.open[0].legs + own.open[1].legs;
  }

  std::int64_t book(std::int64_t rank, Phase phase, std::uint32_t prompt_tokens,
                    std::uint32_t output_tokens, std::uint32_t cached_tokens = 0,
                    double now_s = std::numeric_limits<double>::quiet_NaN()) {
    return ledger_.book(checked(rank), phase, prompt_tokens, output_tokens,
                        cached_tokens, now_s);
  }

  bool release(std::int64_t number) { return ledger_.release(number); }
  std::int64_t expire(double now_s) { return ledger_.expire(now_s); }
  std::size_t open_bookings() const { return ledger_.open_bookings(); }
  bool is_idle() const { return ledger_.is_idle(); }

  /// Takes in an engine's message. False when it is stale: not newer than the last of
  /// its incarnation, or of the incarnation before. Throws on figures below zero.
  bool hear(std::int64_t rank, const Message& message) {
    const std::size_t index = checked(rank);
    check(message);
    Engine& engine = engines_[index];
    if (engine.heard && !is_news(engine, message)) return false;
    if (engine.heard && message.incarnation != engine.message.incarnation) {
      engine.retired_incarnation = engine.message.incarnation;
      engine.restarted = true;
    }
    engine.message = message;
    engine.heard = true;
    ledger_.see(index, message.booking_seen);
    return true;
  }

  void set_costs(std::int64_t rank, const Costs& costs) {
    Engine& engine = engines_[checked(rank)];
    costs.check();
    engine.costs = costs;
    engine.has_costs = true;
  }

  void set_limits(std::int64_t rank, const Limits& limits) {
    Engine& engine = engines_[checked(rank)];
    limits.check();
    engine.limits = limits;
  }

  void report(std::int64_t rank, std::int64_t waiting, std::int64_t running,
              double kv_usage) {
    engines_[checked(rank)].counts = {waiting, running, kv_usage};
  }

  /// Counts work sent since the last report, which the next report will include.
  void expect_waiting(std::int64_t rank, std::int64_t requests) {
    engines_[checked(rank)].counts.waiting += requests;
  }

 private:
  static bool is_news(const Engine& engine, const Message& message) {
    if (message.incarnation == engine.message.incarnation)
      return message.sequence > engine.message.sequence;
    return !engine.restarted || message.incarnation != engine.retired_incarnation;
  }

  static void check(const Message& m) {
    const std::int64_t least =
        std::min({m.booking_seen, m.prefill_tokens, m.output_tokens, m.context_tokens,
                  m.running, m.waiting, m.waiting_remote, m.kv_free_blocks,
                  m.kv_pinned_blocks, m.block_tokens});
    if (least < 0) throw std::invalid_argument("a message counts below zero");
    if (m.kv_free_blocks > m.kv_total_blocks)
      throw std::invalid_argument("a message has more KV blocks free than there are");
    if (!std::isfinite(m.now_s)) throw std::invalid_argument("now_s must be finite");
  }

  /// Signed, so that Python's -1 is out of range and not a wrong type.
  std::size_t checked(std::int64_t rank) const {
    if (rank < 0 || static_cast<std::size_t>(rank) >= engines_.size())
      throw std::out_of_range("rank " + std::to_string(rank) + " of " +
                              std::to_string(engines_.size()) + " engines");
    return static_cast<std::size_t>(rank);
  }

  Ledger ledger_;
  std::vector<Engine> engines_;
  Patience patience_;
};

}  // namespace calrouter
