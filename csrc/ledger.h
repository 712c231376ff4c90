// The ledger: every leg this router has under way, counted once, and which of them
// the engines' own figures already include.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace calrouter {

enum class Phase : std::uint8_t { Prefill = 0, Decode = 1 };

/// One leg under way; a link in its engine's list, which is in order of number.
struct Booking {
  std::int64_t number;
  std::size_t rank;
  Phase phase;
  std::uint32_t prompt_tokens;
  std::uint32_t output_tokens;
  std::uint32_t uncached_tokens;  // of the prompt, to be computed
  double booked_s;                // NaN: not dated yet
  double due_s;                   // when it should have ended; infinite: whenever
  Booking* previous = nullptr;
  Booking* next = nullptr;
};

/// Sums over bookings. Integers only, so that what was added can be taken away without
/// a rest: 32 bits of tokens a leg never overflow 64-bit sums, and the sum of squares,
/// which may, is exact modulo 2^64.
struct Tally {
  std::int64_t legs = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t uncached_tokens = 0;
  std::uint64_t uncached_tokens_sq = 0;

  void add(const Booking& booking) {
    legs += 1;
    prompt_tokens += booking.prompt_tokens;
    output_tokens += booking.output_tokens;
    uncached_tokens += booking.uncached_tokens;
    uncached_tokens_sq += square(booking);
  }

  void take(const Booking& booking) {
    legs -= 1;
    prompt_tokens -= booking.prompt_tokens;
    output_tokens -= booking.output_tokens;
    uncached_tokens -= booking.uncached_tokens;
    uncached_tokens_sq -= square(booking);
  }

  bool is_zero() const {
    return legs == 0 && prompt_tokens == 0 && output_tokens == 0 &&
           uncached_tokens == 0 && uncached_tokens_sq == 0;
  }

 private:
  static std::uint64_t square(const Booking& booking) {
    return std::uint64_t{booking.uncached_tokens} * booking.uncached_tokens;
  }
};

/// One engine's share of the ledger, by phase: all open bookings, and those the
/// engine's last message does not include.
struct Account {
  Tally open[2];
  Tally unseen[2];
};

class Ledger {
 public:
  /// `lease_s`: a booking older than this is dropped by `expire`.
  Ledger(std::size_t engines, double lease_s)
      : accounts_(engines), lists_(engines), lease_s_(lease_s) {
    if (engines == 0) throw std::invalid_argument("a table needs at least one engine");
    if (!(lease_s > 0.0)) throw std::invalid_argument("lease_s must be above 0");
    open_.reserve(4096);
  }

  const Account& account(std::size_t rank) const { return accounts_[rank]; }
  std::size_t open_bookings() const { return open_.size(); }

  /// An engine's oldest open booking, the head of its list; nullptr: none.
  const Booking* first_open(std::size_t rank) const { return lists_[rank].head; }

  /// Books one leg and returns its number; numbers start at 1 and only grow.
  std::int64_t book(std::size_t rank, Phase phase, std::uint32_t prompt_tokens,
                    std::uint32_t output_tokens, std::uint32_t cached_tokens,
                    double now_s, double due_s) {
    if (cached_tokens > prompt_tokens)
      throw std::invalid_argument("cached_tokens exceeds prompt_tokens");
    const std::int64_t number = last_number_ + 1;
    // May throw, so it comes before anything is counted.
    Booking& booking =
        open_
            .emplace(number, Booking{number, rank, phase, prompt_tokens, output_tokens,
                                     prompt_tokens - cached_tokens, now_s, due_s})
            .first->second;
    last_number_ = number;
    append(booking);
    return number;
  }

  /// Ends a booking and returns its engine. Nothing when the number is unknown or was
  /// released before, so that two ways of noticing an end can never count it twice.
  std::optional<std::size_t> release(std::int64_t number) {
    const auto found = open_.find(number);
    if (found == open_.end()) return std::nullopt;
    const std::size_t rank = found->second.rank;
    unlink(found->second);
    open_.erase(found);
    return rank;
  }

  /// Drops every booking whose lease has passed and returns how many. One that was
  /// booked without a date is dated now.
  std::int64_t expire(double now_s) {
    std::int64_t dropped = 0;
    for (auto entry = open_.begin(); entry != open_.end();) {
      Booking& booking = entry->second;
      if (std::isnan(booking.booked_s)) booking.booked_s = now_s;
      if (now_s - booking.booked_s > lease_s_) {
        unlink(booking);
        entry = open_.erase(entry);
        ++dropped;
      } else {
        ++entry;
      }
    }
    return dropped;
  }

  /// An engine's figures include this router's bookings up to `echo`. The echo falls
  /// when an engine starts again: what it lost is unseen again. An echo of numbers
  /// never given is another router's, and reaches no further than the last one given.
  void see(std::size_t rank, std::int64_t echo) {
    List& list = lists_[rank];
    Tally* unseen = accounts_[rank].unseen;
    list.echo = std::min(echo, last_number_);
    while (list.first_unseen && list.first_unseen->number <= list.echo) {
      unseen[phase_of(*list.first_unseen)].take(*list.first_unseen);
      list.first_unseen = list.first_unseen->next;
    }
    for (Booking* earlier = before_unseen(list);
         earlier && earlier->number > list.echo; earlier = earlier->previous) {
      unseen[phase_of(*earlier)].add(*earlier);
      list.first_unseen = earlier;
    }
  }

  /// No booking is open and every counter is exactly zero.
  bool is_idle() const {
    const auto zero = [](const Account& account) {
      return account.open[0].is_zero() && account.open[1].is_zero() &&
             account.unseen[0].is_zero() && account.unseen[1].is_zero();
    };
    return open_.empty() && std::all_of(accounts_.begin(), accounts_.end(), zero);
  }

 private:
  struct List {
    Booking* head = nullptr;
    Booking* tail = nullptr;
    Booking* first_unseen = nullptr;
    std::int64_t echo = 0;
  };

  static std::size_t phase_of(const Booking& booking) {
    return static_cast<std::size_t>(booking.phase);
  }

  static Booking* before_unseen(const List& list) {
    return list.first_unseen ? list.first_unseen->previous : list.tail;
  }

  /// A new booking is above every echo, hence unseen.
  void append(Booking& booking) {
    List& list = lists_[booking.rank];
    booking.previous = list.tail;
    (list.tail ? list.tail->next : list.head) = &booking;
    list.tail = &booking;
    if (!list.first_unseen) list.first_unseen = &booking;
    Account& account = accounts_[booking.rank];
    account.open[phase_of(booking)].add(booking);
    account.unseen[phase_of(booking)].add(booking);
  }

  void unlink(Booking& booking) {
    List& list = lists_[booking.rank];
    Account& account = accounts_[booking.rank];
    account.open[phase_of(booking)].take(booking);
    if (booking.number > list.echo) account.unseen[phase_of(booking)].take(booking);
    if (list.first_unseen == &booking) list.first_unseen = booking.next;
    (booking.previous ? booking.previous->next : list.head) = booking.next;
    (booking.next ? booking.next->previous : list.tail) = booking.previous;
  }

  std::vector<Account> accounts_;
  std::vector<List> lists_;
  // Its nodes stay where they are, which the lists rely on.
  std::unordered_map<std::int64_t, Booking> open_;
  std::int64_t last_number_ = 0;
  double lease_s_;
};

}  // namespace calrouter
