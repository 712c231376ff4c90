// What a placement policy is: from the ranks [begin, end) it picks one.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "price.h"

namespace calrouter {

struct Score {
  std::size_t rank;
  double value;  // lower is better
};

class Policy {
 public:
  Policy(std::size_t begin, std::size_t end) : begin_(begin), end_(end) {
    if (begin >= end) throw std::invalid_argument("a pool needs at least one engine");
    scores_.reserve(end - begin);
  }
  virtual ~Policy() = default;
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  virtual const char* name() const = 0;

  /// Why the last pick fell as it did, in a few words.
  virtual std::string reason() const = 0;

  /// Picks a rank of the pool. The table is changed only by policies that count what
  /// they expect an engine to report next. Does not allocate (`deadline`: while no engine
  /// has more than 4,096 legs of this router).
  std::size_t pick(Table& table, const Demand& demand) {
    if (end_ > table.engines()) throw std::out_of_range("the pool exceeds the table");
    if (demand.cached_tokens < 0 || demand.cached_tokens > demand.prompt_tokens ||
        demand.output_tokens < 0)
      throw std::invalid_argument("a request's tokens must be at least 0, and no more "
                                  "cached than there are in the prompt");
    if (demand.source_rank < Demand::kNowhere ||
        demand.source_rank >= static_cast<std::int64_t>(table.engines()))
      throw std::out_of_range("source_rank is no engine of the table");
    if (std::isnan(demand.due_s)) throw std::invalid_argument("due_s must be a number");
    if (demand.prefixes && demand.prefixes->engines() != table.engines())
      throw std::invalid_argument("the prefixes are of other engines");
    scores_.clear();
    return choose(table, demand);
  }

  /// Candidates of the last pick, in the order they were looked at.
  const std::vector<Score>& scores() const { return scores_; }

  /// Whether scores are prices, which have terms.
  virtual bool prices() const { return false; }

  /// What the score of a candidate of the last pick is the sum of; `place` is that in
  /// `scores()`. As it was at the pick, whatever the table went through since.
  virtual Price terms(std::size_t place) const {
    throw std::logic_error("policy " + std::string(name()) + " prices nothing, place " +
                           std::to_string(place));
  }

  std::size_t begin() const { return begin_; }
  std::size_t end() const { return end_; }
  std::size_t size() const { return end_ - begin_; }

 protected:
  virtual std::size_t choose(Table& table, const Demand& demand) = 0;

  /// The least score among the ranks [first, first + count), scanned from the offset
  /// `start`, which decides ties.
  template <class ScoreOf>
  std::size_t least(std::size_t first, std::size_t count, std::size_t start,
                    ScoreOf&& score_of) {
    std::size_t best = first;
    double least_value = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t rank = first + (start + i) % count;
      const double value = score_of(rank);
      scores_.push_back({rank, value});
      if (value < least_value) {
        least_value = value;
        best = rank;
      }
    }
    return best;
  }

  std::vector<Score> scores_;

 private:
  std::size_t begin_;
  std::size_t end_;
};

}  // namespace calrouter
