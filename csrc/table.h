// The load table: what one router has booked on each engine, what the engines last
// said of themselves, and what work costs there. No Python, no clock, no I/O.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
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
  double now_s = 0.0;       // when it was heard
  double step_age_s = 0.0;  // how long its step had been under way by then
};

/// What vLLM's own balancer is told: requests, requests, fraction of KV blocks in use.
struct Counts {
  std::int64_t waiting = 0;
  std::int64_t running = 0;
  double kv_usage = 0.0;
};

struct Engine {
  Message message;
  Costs costs;
  Limits limits;
  Counts counts;
};

/// What a choice reads of every engine first; small, so that a thousand stay cached.
struct Pulse {
  // Another whenever a figure that is priced may have changed; no two tables share one.
  std::uint64_t version = next_version();
  double heard_s = kNever;
  double step_age_s = 0.0;
  bool has_costs = false;
  std::int32_t host = 0;  // engines of one number share a host

  static constexpr double kNever = std::numeric_limits<double>::infinity();
  bool was_heard() const { return heard_s != kNever; }
  void changed() { version = next_version(); }

 private:
  static std::uint64_t next_version() {
    static std::atomic<std::uint64_t> last{0};
    return last.fetch_add(1, std::memory_order_relaxed) + 1;
  }
};

/// How long things may last, in seconds.
struct Patience {
  /// A booking older than this is dropped by `expire`. Longer than any request should
  /// last: it only mends a release that was lost.
  double lease_s = 3600.0;
  /// Beyond this the time without a message is added to an engine's price: three times
  /// the heartbeat of one that lives, whatever its steps take.
  double silent_s = 0.3;
  /// Beyond this the time without news is, also that of a step under way.
  double stale_s = 1.0;
  /// Beyond this an engine is not chosen, unless all are silent so long.
  double dead_s = 10.0;

  void check() const {
    if (!(silent_s >= 0.0)) throw std::invalid_argument("silent_s must be at least 0");
    if (!(stale_s >= 0.0)) throw std::invalid_argument("stale_s must be at least 0");
    if (!(dead_s >= stale_s))
      throw std::invalid_argument("dead_s must be at least stale_s");
  }
};

class Table {
 public:
  explicit Table(std::size_t engines, const Patience& patience = {})
      : ledger_(engines, patience.lease_s),
        engines_(engines),
        pulses_(engines),
        patience_(patience) {
    patience.check();
    // One by one: copies would share a version.
    for (Pulse& pulse : pulses_) pulse.changed();
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
  const Booking* first_open_at(std::size_t rank) const {
    return ledger_.first_open(rank);
  }
  const Pulse& pulse_at(std::size_t rank) const { return pulses_[rank]; }
  std::int32_t host_at(std::size_t rank) const { return pulses_[rank].host; }

  /// Seconds since an engine's last message; infinite when there was none.
  double silence_s(std::int64_t rank, double now_s) const {
    const Pulse& pulse = pulses_[checked(rank)];
    return pulse.was_heard() ? std::max(0.0, now_s - pulse.heard_s) : Pulse::kNever;
  }

  /// The last message; nullptr when there was none.
  const Message* heard(std::int64_t rank) const {
    const std::size_t index = checked(rank);
    return pulses_[index].was_heard() ? &engines_[index].message : nullptr;
  }

  /// Own legs under way on an engine, of both phases.
  std::int64_t in_flight(std::int64_t rank) const {
    const Account& own = account(rank);
    return own.open[0].legs + own.open[1].legs;
  }

  std::int64_t book(std::int64_t rank, Phase phase, std::uint32_t prompt_tokens,
                    std::uint32_t output_tokens, std::uint32_t cached_tokens = 0,
                    double now_s = std::numeric_limits<double>::quiet_NaN(),
                    double due_s = std::numeric_limits<double>::infinity()) {
    if (std::isnan(due_s)) throw std::invalid_argument("due_s must be a number");
    const std::size_t index = checked(rank);
    const std::int64_t number = ledger_.book(index, phase, prompt_tokens, output_tokens,
                                             cached_tokens, now_s, due_s);
    pulses_[index].changed();
    return number;
  }

  bool release(std::int64_t number) {
    const std::optional<std::size_t> rank = ledger_.release(number);
    if (rank) pulses_[*rank].changed();
    return rank.has_value();
  }

  std::int64_t expire(double now_s) {
    for (Pulse& pulse : pulses_) pulse.changed();
    return ledger_.expire(now_s);
  }

  std::size_t open_bookings() const { return ledger_.open_bookings(); }
  bool is_idle() const { return ledger_.is_idle(); }

  /// Takes in an engine's message. False when it is stale: not newer than the last one,
  /// of the same incarnation. Throws on figures below zero. Incarnations have no order: a
  /// late message of an old one stands until the next message of the new one. Telling
  /// them apart by what was heard first could shut the living one out for good.
  bool hear(std::int64_t rank, const Message& message) {
    const std::size_t index = checked(rank);
    check(message);
    Engine& engine = engines_[index];
    Pulse& pulse = pulses_[index];
    if (pulse.was_heard() && message.incarnation == engine.message.incarnation &&
        message.sequence <= engine.message.sequence)
      return false;
    engine.message = message;
    pulse.heard_s = message.now_s;
    pulse.step_age_s = message.step_age_s;
    pulse.changed();
    ledger_.see(index, message.booking_seen);
    return true;
  }

  void set_costs(std::int64_t rank, const Costs& costs) {
    const std::size_t index = checked(rank);
    costs.check();
    engines_[index].costs = costs;
    pulses_[index].has_costs = true;
    pulses_[index].changed();
  }

  void set_limits(std::int64_t rank, const Limits& limits) {
    const std::size_t index = checked(rank);
    limits.check();
    engines_[index].limits = limits;
    pulses_[index].changed();
  }

  /// Says on which host an engine runs; all are on one until this is said.
  void set_host(std::int64_t rank, std::int32_t host) {
    pulses_[checked(rank)].host = host;
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
  static void check(const Message& m) {
    const std::int64_t least =
        std::min({m.booking_seen, m.prefill_tokens, m.output_tokens, m.context_tokens,
                  m.running, m.waiting, m.waiting_remote, m.kv_free_blocks,
                  m.kv_pinned_blocks, m.block_tokens});
    if (least < 0) throw std::invalid_argument("a message counts below zero");
    if (m.kv_free_blocks > m.kv_total_blocks)
      throw std::invalid_argument("a message has more KV blocks free than there are");
    if (!std::isfinite(m.now_s)) throw std::invalid_argument("now_s must be finite");
    if (!(m.step_age_s >= 0.0) || std::isinf(m.step_age_s))
      throw std::invalid_argument("step_age_s must be finite and at least 0");
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
  std::vector<Pulse> pulses_;
  Patience patience_;
};

}  // namespace calrouter
