// The placement policies. Each is described by its formula, inputs, and when it loses.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

#include "policy.h"
#include "queue.h"

namespace calrouter {

struct PolicyOptions {
  std::size_t start = 0;     // offset in the pool at which turns begin
  std::int64_t routers = 1;  // routers that share the engines
  std::int64_t seed = 0;
  std::int64_t threshold_tokens = 512;
  double long_share = 0.5;
  Serves serves = Serves::Both;
  Weights weights;
};

/// Ranks in turn. Reads nothing. Exactly even in counts; loses as soon as requests
/// differ in size.
class RoundRobin final : public Policy {
 public:
  RoundRobin(std::size_t begin, std::size_t end, const PolicyOptions& options)
      : Policy(begin, end), turn_(options.start) {}
  const char* name() const override { return "round_robin"; }
  std::string reason() const override { return "its turn"; }

 protected:
  std::size_t choose(Table&, const Demand&) override {
    const std::size_t rank = begin() + turn_ % size();
    ++turn_;
    scores_.push_back({rank, 0.0});
    return rank;
  }

 private:
  std::size_t turn_;
};

/// Fewest legs in flight (both phases) among this router's own; equal engines take
/// turns. Loses when legs differ in length, or other routers load the engines.
class LeastLoaded final : public Policy {
 public:
  LeastLoaded(std::size_t begin, std::size_t end, const PolicyOptions& options)
      : Policy(begin, end), turn_(options.start) {}
  const char* name() const override { return "least_loaded"; }
  std::string reason() const override { return "fewest legs in flight"; }

 protected:
  std::size_t choose(Table& table, const Demand&) override {
    const std::size_t rank = least(begin(), size(), turn_, [&](std::size_t r) {
      return static_cast<double>(table.in_flight(r));
    });
    // After the chosen one. A start that moves by one a pick would favour the engine
    // that follows a loaded one: two idle engines of three would share 2 to 1.
    turn_ = rank - begin() + 1;
    return rank;
  }

 private:
  std::size_t turn_;
};

/// Two distinct engines drawn at random, the one with fewer legs in flight. Routers
/// that do not see each other herd less than with `least_loaded`; loses to it when
/// there is only one router.
class PowerOfTwo final : public Policy {
 public:
  PowerOfTwo(std::size_t begin, std::size_t end, const PolicyOptions& options)
      : Policy(begin, end), random_(static_cast<std::uint64_t>(options.seed)) {}
  const char* name() const override { return "power_of_two"; }
  std::string reason() const override { return "fewer legs of two drawn"; }

 protected:
  std::size_t choose(Table& table, const Demand&) override {
    const std::size_t first = draw(size());
    if (size() == 1) return look(table, first);
    std::size_t second = draw(size() - 1);
    if (second >= first) ++second;
    const std::size_t a = look(table, first);
    const std::size_t b = look(table, second);
    return table.in_flight(b) < table.in_flight(a) ? b : a;
  }

 private:
  std::size_t draw(std::size_t below) { return random_() % below; }

  std::size_t look(const Table& table, std::size_t offset) {
    const std::size_t rank = begin() + offset;
    scores_.push_back({rank, static_cast<double>(table.in_flight(rank))});
    return rank;
  }

  std::mt19937_64 random_;
};

/// Requests predicted longer than `threshold_tokens` go to the last
/// ceil(long_share * n) engines of the pool, the others to the rest; fewest legs in
/// flight within either. Keeps short requests out of long ones' way; loses when the
/// mix does not match the share.
class LengthThreshold final : public Policy {
 public:
  LengthThreshold(std::size_t begin, std::size_t end, const PolicyOptions& options)
      : Policy(begin, end),
        threshold_tokens_(options.threshold_tokens),
        long_engines_(long_engines(options.long_share)) {
    turns_[0] = turns_[1] = options.start;
  }
  const char* name() const override { return "length_threshold"; }
  std::string reason() const override {
    const bool is_long = last_predicted_ > threshold_tokens_;
    return std::string(is_long ? "long" : "short") + ": predicted " +
           std::to_string(last_predicted_) + (is_long ? " > " : " <= ") +
           std::to_string(threshold_tokens_) + " tokens";
  }

 protected:
  std::size_t choose(Table& table, const Demand& demand) override {
    last_predicted_ = demand.output_tokens;
    const std::size_t short_engines = size() - long_engines_;
    // A pool of one engine has no short set.
    const bool to_long = last_predicted_ > threshold_tokens_ || short_engines == 0;
    const std::size_t first = to_long ? begin() + short_engines : begin();
    const std::size_t count = to_long ? long_engines_ : short_engines;
    const std::size_t rank = least(first, count, turns_[to_long], [&](std::size_t r) {
      return static_cast<double>(table.in_flight(r));
    });
    turns_[to_long] = rank - first + 1;
    return rank;
  }

 private:
  std::size_t long_engines(double share) const {
    if (!(share > 0.0 && share <= 1.0))
      throw std::invalid_argument("long_share must be above 0 and at most 1");
    // 0.07 of 100 engines is a little more than 7 in binary, and means 7.
    const double exact = share * static_cast<double>(size());
    const auto wanted = static_cast<std::size_t>(std::ceil(exact - 1e-9));
    return std::max<std::size_t>(1, std::min(wanted, size() - 1));
  }

  std::int64_t threshold_tokens_;
  std::size_t long_engines_;
  std::size_t turns_[2];
  std::int64_t last_predicted_ = 0;
};

/// The rule of vLLM's own data-parallel client (0.32 and 0.33), within a pool:
/// max(routers * own legs, waiting + running) + waiting * 6 * max(0, KV use - 0.5),
/// scanned from an engine that moves on by one each pick. What it knows of other
/// routers is as old as the last report (100 ms). Blind to the size of requests.
class VllmOwn final : public Policy {
 public:
  VllmOwn(std::size_t begin, std::size_t end, const PolicyOptions& options)
      : Policy(begin, end), turn_(options.start), routers_(options.routers) {
    if (routers_ < 1) throw std::invalid_argument("routers must be at least 1");
  }
  const char* name() const override { return "vllm"; }
  std::string reason() const override { return "least by vLLM's own rule"; }

 protected:
  std::size_t choose(Table& table, const Demand&) override {
    const std::size_t rank = least(begin(), size(), turn_++, [&](std::size_t r) {
      return cost(table.engine(r).counts, table.in_flight(r));
    });
    table.expect_waiting(rank, routers_);
    return rank;
  }

 private:
  double cost(const Counts& counts, std::int64_t in_flight) const {
    const std::int64_t reported = counts.waiting + counts.running;
    const double requests =
        static_cast<double>(std::max(routers_ * in_flight, reported));
    // Multiplied in vLLM's order, or the last bit breaks a tie the other way.
    const double waiting = static_cast<double>(counts.waiting);
    return requests + waiting * 6.0 * std::max(0.0, counts.kv_usage - 0.5);
  }

  std::size_t turn_;
  std::int64_t routers_;
};

/// What the policies share that choose by price.
class Pricing : public Policy {
 public:
  Pricing(std::size_t begin, std::size_t end, const PolicyOptions& options)
      : Policy(begin, end),
        serves_(options.serves),
        weights_(options.weights),
        turn_(options.start) {
    weights_.check();
  }

  bool prices() const override { return true; }

  std::string reason() const override {
    if (scores_.empty()) return "nothing chosen yet";
    const Price price = terms(best_);
    const auto most = std::max_element(price.begin(), price.end()) - price.begin();
    char text[120];
    std::snprintf(text, sizeof text, "least of %zu prices: %.4f s, most of it %s%s",
                  scores_.size(), scores_[best_].value, kTermNames[most],
                  scores_.size() < size() ? "; silent engines left out" : "");
    return text;
  }

 protected:
  /// Picks by the least of `seconds_at(rank)` among the engines that are alive, or all
  /// if none is. Equal prices take turns.
  template <class SecondsAt>
  std::size_t cheapest(const Table& table, double now_s, SecondsAt&& seconds_at) {
    const bool all = !any_alive(table, now_s);
    double least_s = std::numeric_limits<double>::infinity();
    best_ = 0;
    std::size_t rank = begin() + turn_ % size();
    for (std::size_t i = 0; i < size(); ++i, rank = next(rank)) {
      if (!table.pulse_at(rank).has_costs)
        throw std::logic_error("no costs were set for rank " + std::to_string(rank));
      if (!all && is_dead(table, rank, now_s)) continue;
      const double seconds = seconds_at(rank);
      if (seconds < least_s) {
        least_s = seconds;
        best_ = scores_.size();
      }
      scores_.push_back({rank, seconds});
    }
    const std::size_t chosen = scores_[best_].rank;
    turn_ = chosen - begin() + 1;
    return chosen;
  }

  const Serves serves_;
  const Weights weights_;

 private:
  std::size_t next(std::size_t rank) const {
    return rank + 1 == end() ? begin() : rank + 1;
  }

  static bool is_dead(const Table& table, std::size_t rank, double now_s) {
    const Pulse& pulse = table.pulse_at(rank);
    return pulse.was_heard() && now_s - pulse.heard_s > table.patience().dead_s;
  }

  bool any_alive(const Table& table, double now_s) const {
    for (std::size_t rank = begin(); rank < end(); ++rank)
      if (!is_dead(table, rank, now_s)) return true;
    return false;
  }

  std::size_t best_ = 0;  // its place among the candidates
  std::size_t turn_;
};

/// The least price in seconds (docs/pricing.md): what the engine has to do first, what
/// the request itself costs there, and what it costs those who come after. Engines long
/// silent are left out. Loses to counting where requests are all of one size, so that
/// there is nothing to price.
class Calibrated : public Pricing {
 public:
  Calibrated(std::size_t begin, std::size_t end, const PolicyOptions& options)
      : Pricing(begin, end, options),
        routers_(static_cast<double>(options.routers)),
        known_(end - begin) {
    if (options.routers < 1) throw std::invalid_argument("routers must be at least 1");
  }
  const char* name() const override { return "calibrated"; }

  Price terms(std::size_t place) const override {
    const Known& known = known_[scores_[place].rank - begin()];
    return price_at(known);
  }

 protected:
  std::size_t choose(Table& table, const Demand& demand) override {
    demand_ = demand;
    return cheapest(table, demand.now_s, [&](std::size_t rank) {
      return total_s(price_at(look(table, rank)));
    });
  }

  /// One engine as it was when last looked at.
  struct Known {
    std::uint64_t version = 0;
    Moment now;
    Offer offer;
  };

  Price price_at(const Known& known) const {
    return price_of(known.offer, serves_, weights_, demand_, known.now);
  }

  const Known& look(const Table& table, std::size_t rank) {
    Known& known = known_[rank - begin()];
    const Pulse& pulse = table.pulse_at(rank);
    if (known.version != pulse.version) {
      known.version = pulse.version;
      known.offer =
          offer_of(table.engine_at(rank), table.account_at(rank), serves_, routers_);
    }
    // Who was never heard (at infinity) has nothing to be silent about.
    const double since_s = std::max(0.0, demand_.now_s - pulse.heard_s);
    // An engine may be stuck in a step and still be heard: its step's age counts too.
    const double quiet_s = since_s + pulse.step_age_s;
    const Patience& patience = table.patience();
    known.now.silence_s =
        std::max({0.0, since_s - patience.silent_s, quiet_s - patience.stale_s});
    known.now.worked_s = std::min(quiet_s, patience.stale_s);
    known.now.uncached_tokens = demand_.uncached_tokens(rank);
    known.now.far = demand_.source_rank != Demand::kNowhere &&
                table.host_at(static_cast<std::size_t>(demand_.source_rank)) !=
                    table.host_at(rank);
    return known;
  }

  Demand demand_;

 private:
  double routers_;
  std::vector<Known> known_;
};

/// `calibrated`, for prefill engines that serve in the order `deadline`: a request waits
/// for what goes before it in that order, and each deadline that is missed because of it
/// counts more than any wait. A pool that decodes, too, is priced as by `calibrated`:
/// bookings do not tell whose prompt still waits there.
class Deadline final : public Calibrated {
 public:
  Deadline(std::size_t begin, std::size_t end, const PolicyOptions& options)
      : Calibrated(begin, end, options), prices_(end - begin), queue_(kLegs) {}
  const char* name() const override { return "deadline"; }

  Price terms(std::size_t place) const override {
    return prices_[scores_[place].rank - begin()];
  }

 protected:
  std::size_t choose(Table& table, const Demand& demand) override {
    demand_ = demand;
    return cheapest(table, demand.now_s, [&](std::size_t rank) {
      Price& price = prices_[rank - begin()];
      price = price_at(look(table, rank));
      if (serves_ == Serves::Prefill) join(table, rank, price);
      return total_s(price);
    });
  }

 private:
  void join(const Table& table, std::size_t rank, Price& price) {
    const Engine& engine = table.engine_at(rank);
    const Costs& costs = engine.costs;
    queue_.clear();
    for (const Booking* own = table.first_open_at(rank); own; own = own->next)
      if (own->phase == Phase::Prefill)
        queue_.add(waiting(own->booked_s, own->due_s,
                           costs.prefill_s(number(std::int64_t{own->uncached_tokens}))));
    // Whoever is silent may stay so as long again before it goes on.
    const double from_s = demand_.now_s + price[kSilence];
    const Joined joined = queue_.join(
        waiting(demand_.now_s, demand_.due_s, price[kPrefillOwn]), from_s,
        price[kPrefillBacklog],
        costs.prefill_s(number(
            std::min(engine.limits.max_num_batched_tokens, kStepTokens))));
    price[kPrefillBacklog] = joined.wait_s;
    price[kSlo] = weights_.slo * kMissS * static_cast<double>(joined.new_misses);
  }

  /// Who has no deadline gives way as in the order `short_first`.
  Waiting waiting(double since_s, double due_s, double cost_s) const {
    if (due_s != Demand::kNever) return {due_s, due_s, cost_s};
    const double known_s = std::isnan(since_s) ? demand_.now_s : since_s;
    return {known_s + kGivesWay * cost_s, due_s, cost_s};
  }

  /// What a deadline that is missed counts, in seconds: more than any wait.
  static constexpr double kMissS = 1e3;
  /// `WEIGHT` of vllm_calrouter/ordering/short_first.py.
  static constexpr double kGivesWay = 3.0;
  /// `STEP_TOKENS` of vllm_calrouter/ordering/deadline.py: beyond it a step takes no
  /// further prompt with a deadline.
  static constexpr std::int64_t kStepTokens = 2048;
  /// An engine's open legs up to which a choice never allocates.
  static constexpr std::size_t kLegs = 4096;

  std::vector<Price> prices_;
  Queue queue_;
};

/// The score of the study "Calibrate, Then Route", as docs/pricing.md reads it: seconds
/// of this router's own backlog, the request's own seconds, KV use after admission, and
/// backlog once more by the tightness of the SLO. Takes decode for a queue: blind to
/// slots and batching, and to other routers. Loses when slots bind.
class Paper final : public Pricing {
 public:
  Paper(std::size_t begin, std::size_t end, const PolicyOptions& options)
      : Pricing(begin, end, options), prices_(end - begin) {}
  const char* name() const override { return "paper"; }

  Price terms(std::size_t place) const override {
    return prices_[scores_[place].rank - begin()];
  }

 protected:
  std::size_t choose(Table& table, const Demand& demand) override {
    return cheapest(table, demand.now_s, [&](std::size_t rank) {
      Price& price = prices_[rank - begin()];
      price = paper_price_of(table.engine_at(rank), table.account_at(rank), serves_,
                             weights_, demand, demand.uncached_tokens(rank));
      return total_s(price);
    });
  }

 private:
  std::vector<Price> prices_;
};

inline constexpr const char* kPolicyNames[] = {"vllm", "round_robin", "least_loaded",
                                               "power_of_two", "length_threshold", "calibrated",
                                               "deadline", "paper"};

inline std::unique_ptr<Policy> make_policy(const std::string& name, std::size_t begin,
                                           std::size_t end,
                                           const PolicyOptions& options) {
  if (name == "round_robin") return std::make_unique<RoundRobin>(begin, end, options);
  if (name == "least_loaded") return std::make_unique<LeastLoaded>(begin, end, options);
  if (name == "power_of_two") return std::make_unique<PowerOfTwo>(begin, end, options);
  if (name == "length_threshold")
    return std::make_unique<LengthThreshold>(begin, end, options);
  if (name == "vllm") return std::make_unique<VllmOwn>(begin, end, options);
  if (name == "calibrated") return std::make_unique<Calibrated>(begin, end, options);
  if (name == "deadline") return std::make_unique<Deadline>(begin, end, options);
  if (name == "paper") return std::make_unique<Paper>(begin, end, options);
  std::string known;
  for (const char* policy : kPolicyNames) known += std::string(" ") + policy;
  throw std::invalid_argument("unknown policy '" + name + "', known:" + known);
}

}  // namespace calrouter
