// The core alone, without Python; built by run.sh under sanitizers.
#include <cstdio>
#include <functional>
#include <string>

#include "../policies.h"

using namespace calrouter;

namespace {

int failures = 0;

void expect(bool ok, const char* what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED: %s\n", what);
}

template <class Error>
void expect_throws(const std::function<void()>& action, const char* what) {
  try {
    action();
  } catch (const Error&) {
    return;
  }
  expect(false, what);
}

void releases_once() {
  Table table(2);
  const auto booking = table.book(1, Phase::Decode, 100, 20);
  expect(table.account(1).open[1].legs == 1, "a booking counts");
  expect(table.release(booking), "the first release counts");
  expect(!table.release(booking), "the second release does not");
  expect(!table.release(99), "an unknown number is no booking");
  expect(table.is_idle(), "the table is idle again");
}

void refuses_what_is_not_there() {
  Table table(2);
  expect_throws<std::invalid_argument>([] { Table(0); }, "no engines");
  expect_throws<std::out_of_range>([&] { table.engine(2); }, "rank past the end");
  expect_throws<std::out_of_range>([&] { table.engine(-1); }, "negative rank");
  expect_throws<std::out_of_range>([&] { table.book(2, Phase::Decode, 1, 1); }, "book");
  expect(table.is_idle(), "a refused booking counts nothing");
  expect_throws<std::invalid_argument>([] { RoundRobin(1, 1, {}); }, "empty pool");
  expect_throws<std::invalid_argument>([] { make_policy("x", 0, 1, {}); }, "name");
  auto wide = make_policy("least_loaded", 0, 3, {});
  expect_throws<std::out_of_range>([&] { wide->pick(table, {}); }, "pool past table");
}

void round_robin_is_even() {
  Table table(5);
  auto policy = make_policy("round_robin", 2, 5, {});
  int counts[5] = {};
  for (int i = 0; i < 300; ++i) ++counts[policy->pick(table, {})];
  expect(counts[2] == 100 && counts[3] == 100 && counts[4] == 100, "even turns");
}

void least_loaded_takes_the_fewest() {
  Table table(3);
  auto policy = make_policy("least_loaded", 0, 3, {});
  table.book(0, Phase::Prefill, 1, 1);
  table.book(2, Phase::Decode, 1, 1);
  for (int i = 0; i < 5; ++i) expect(policy->pick(table, {}) == 1, "the empty engine");
}

void least_loaded_shares_ties_evenly() {
  Table table(3);
  auto policy = make_policy("least_loaded", 0, 3, {});
  table.book(2, Phase::Decode, 1, 1);
  int counts[3] = {};
  for (int i = 0; i < 300; ++i) ++counts[policy->pick(table, {})];
  expect(counts[0] == 150 && counts[1] == 150, "idle engines share evenly");
}

void length_threshold_rounds_the_share() {
  Table table(100);
  PolicyOptions options;
  options.long_share = 0.07;
  auto policy = make_policy("length_threshold", 0, 100, options);
  policy->pick(table, {1, 513});
  expect(policy->scores().size() == 7, "7 % of 100 engines are 7");
  expect(policy->reason() == "long: predicted 513 > 512 tokens", "says why");
}

void length_threshold_keeps_sets_apart() {
  Table table(4);
  auto policy = make_policy("length_threshold", 0, 4, {});
  for (int i = 0; i < 8; ++i) {
    expect(policy->pick(table, {10, 10}) < 2, "short ones in the short set");
    expect(policy->pick(table, {10, 9000}) >= 2, "long ones in the long set");
  }
  Table one(1);
  auto alone = make_policy("length_threshold", 0, 1, {});
  expect(alone->pick(one, {10, 10}) == 0, "one engine takes all");
}

void vllm_rule_counts_what_it_sent() {
  Table table(2);
  auto policy = make_policy("vllm", 0, 2, {});
  table.report(0, 0, 3, 0.0);
  table.report(1, 0, 1, 0.0);
  expect(policy->pick(table, {}) == 1, "fewer requests");
  expect(policy->pick(table, {}) == 1, "still fewer");
  expect(policy->pick(table, {}) == 0, "a tie goes to the one whose turn it is");
}

void power_of_two_avoids_the_worst() {
  Table table(3);
  auto policy = make_policy("power_of_two", 0, 3, {});
  for (int i = 0; i < 4; ++i) table.book(1, Phase::Decode, 1, 1);
  for (int i = 0; i < 200; ++i) expect(policy->pick(table, {}) != 1, "never the worst");
}

}  // namespace

int main() {
  releases_once();
  refuses_what_is_not_there();
  round_robin_is_even();
  least_loaded_takes_the_fewest();
  least_loaded_shares_ties_evenly();
  length_threshold_keeps_sets_apart();
  length_threshold_rounds_the_share();
  vllm_rule_counts_what_it_sent();
  power_of_two_avoids_the_worst();
  if (failures == 0) std::printf("core: all checks passed\n");
  return failures == 0 ? 0 : 1;
}
