// The load table: what one router has booked on each engine, and what the engines
// last said of themselves. No Python, no clock, no I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace calrouter {

enum class Phase : std::uint8_t { Prefill = 0, Decode = 1 };

/// One engine's row. `legs`, `prompt_tokens` and `output_tokens` count this router's
/// open bookings; the rest is the engine's own last report (requests, requests, and
/// the fraction of its KV blocks in use).
struct EngineLoad {
  std::int64_t legs[2] = {0, 0};
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t reported_waiting = 0;
  std::int64_t reported_running = 0;
  double reported_kv_usage = 0.0;

  std::int64_t in_flight() const { return legs[0] + legs[1]; }
};

class Table {
 public:
  explicit Table(std::size_t engines) : rows_(engines) {
    if (engines == 0) throw std::invalid_argument("a table needs at least one engine");
    open_.reserve(4096);
  }

  std::size_t engines() const { return rows_.size(); }

  const EngineLoad& row(std::int64_t rank) const { return rows_[checked(rank)]; }

  /// Books one leg and returns its number; numbers start at 1 and only grow. 32 bits of
  /// tokens a leg keep the 64-bit sums from ever overflowing.
  std::int64_t book(std::int64_t rank, Phase phase, std::uint32_t prompt_tokens,
                    std::uint32_t output_tokens) {
    const Booking booking{checked(rank), phase, prompt_tokens, output_tokens};
    // May throw, so it comes before anything is counted.
    open_.emplace(last_booking_ + 1, booking);
    add(booking, +1);
    return ++last_booking_;
  }

  /// Ends a booking. False when the number is unknown or was released before, so that
  /// two ways of noticing an end can never count it twice.
  bool release(std::int64_t number) {
    const auto found = open_.find(number);
    if (found == open_.end()) return false;
    add(found->second, -1);
    open_.erase(found);
    return true;
  }

  void report(std::int64_t rank, std::int64_t waiting, std::int64_t running,
              double kv_usage) {
    EngineLoad& row = rows_[checked(rank)];
    row.reported_waiting = waiting;
    row.reported_running = running;
    row.reported_kv_usage = kv_usage;
  }

  /// Counts work sent since the last report, which the next report will include.
  void expect_waiting(std::int64_t rank, std::int64_t requests) {
    rows_[checked(rank)].reported_waiting += requests;
  }

  std::size_t open_bookings() const { return open_.size(); }

  /// No booking is open and every counter is exactly zero.
  bool is_idle() const {
    if (!open_.empty()) return false;
    for (const EngineLoad& row : rows_) {
      if (row.legs[0] != 0 || row.legs[1] != 0 || row.prompt_tokens != 0 ||
          row.output_tokens != 0)
        return false;
    }
    return true;
  }

 private:
  struct Booking {
    std::size_t rank;
    Phase phase;
    std::int64_t prompt_tokens;
    std::int64_t output_tokens;
  };

  /// Signed, so that Python's -1 is out of range and not a wrong type.
  std::size_t checked(std::int64_t rank) const {
    if (rank < 0 || static_cast<std::size_t>(rank) >= rows_.size())
      throw std::out_of_range("rank " + std::to_string(rank) + " of " +
                              std::to_string(rows_.size()) + " engines");
    return static_cast<std::size_t>(rank);
  }

  void add(const Booking& booking, std::int64_t sign) {
    EngineLoad& row = rows_[booking.rank];
    row.legs[static_cast<std::size_t>(booking.phase)] += sign;
    row.prompt_tokens += sign * booking.prompt_tokens;
    row.output_tokens += sign * booking.output_tokens;
  }

  std::vector<EngineLoad> rows_;
  std::unordered_map<std::int64_t, Booking> open_;
  std::int64_t last_booking_ = 0;
};

}  // namespace calrouter
