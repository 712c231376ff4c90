// A prefill engine's queue in the order `deadline`, as one router knows it: what a
// request that joins waits for, and whom it makes late.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

namespace calrouter {

/// A prompt that waits. Seconds, on the router's clock.
struct Waiting {
  double urgency_s = 0.0;  // what the order sorts by
  double due_s = 0.0;      // infinite: no deadline
  double cost_s = 0.0;     // to compute it alone
  std::size_t place = 0;   // decides between equals
};

/// What becomes of a request that joins a queue.
struct Joined {
  double wait_s = 0.0;
  std::size_t new_misses = 0;  // how many more deadlines are missed, its own included
};

/// Serves by earliest deadline who can still be in time, then the late ones, the
/// cheapest first. Batches, and the bound on what late ones wait, are left out.
class Queue {
 public:
  explicit Queue(std::size_t expected) { waiting_.reserve(expected); }

  void clear() {
    waiting_.clear();
    cost_s_ = 0.0;
  }

  void add(Waiting one) {
    one.place = waiting_.size();
    waiting_.push_back(one);
    cost_s_ += one.cost_s;
  }

  /// `backlog_s`: all that the engine has to compute. Where that is less than those known
  /// here cost, part of theirs is done, or they share steps; where it is more, others are
  /// there, too, half of whom are taken to go first. Half a step of at most `full_step_s`
  /// is taken to be under way, which nobody overtakes.
  Joined join(const Waiting& newcomer, double now_s, double backlog_s,
              double full_step_s) {
    std::sort(waiting_.begin(), waiting_.end(), [](const Waiting& a, const Waiting& b) {
      return a.urgency_s != b.urgency_s ? a.urgency_s < b.urgency_s : a.place < b.place;
    });
    const double under_way_s = 0.5 * std::min(backlog_s, full_step_s);
    const double rest_s = backlog_s - under_way_s;
    const double unknown_s = std::max(0.0, rest_s - cost_s_);
    share_left_ = rest_s < cost_s_ ? rest_s / cost_s_ : 1.0;
    const double start_s = now_s + under_way_s + 0.5 * unknown_s;
    const Served without = serve(start_s, nullptr);
    const Served with = serve(start_s, &newcomer);
    return {with.newcomer_s - now_s,
            with.misses > without.misses ? with.misses - without.misses : 0};
  }

 private:
  struct Served {
    std::size_t misses = 0;
    double newcomer_s = 0.0;  // when it begins
  };

  Served serve(double start_s, const Waiting* newcomer) const {
    Served served;
    double time_s = start_s;
    double cheaper_late_s = 0.0;
    bool newcomer_is_late = false;
    bool met = newcomer == nullptr;
    const auto meet = [&] {
      met = true;
      newcomer_is_late = time_s + newcomer->cost_s > newcomer->due_s;
      served.misses += newcomer_is_late;
      served.newcomer_s = time_s;
      if (!newcomer_is_late) time_s += newcomer->cost_s;
    };
    for (const Waiting& one : waiting_) {
      if (!met && newcomer->urgency_s < one.urgency_s) meet();
      const double cost_s = share_left_ * one.cost_s;
      if (time_s + cost_s <= one.due_s) {
        time_s += cost_s;
      } else {
        ++served.misses;
        if (newcomer && one.cost_s <= newcomer->cost_s) cheaper_late_s += cost_s;
      }
    }
    if (!met) meet();
    if (newcomer_is_late) served.newcomer_s = time_s + cheaper_late_s;
    return served;
  }

  std::vector<Waiting> waiting_;
  double cost_s_ = 0.0;
  double share_left_ = 1.0;  // of each known prompt
};

}  // namespace calrouter
