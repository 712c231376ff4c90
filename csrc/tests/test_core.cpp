// The core alone, without Python; built by run.sh under sanitizers.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>

#include "../policies.h"

using namespace calrouter;

static std::size_t allocations = 0;

// Not inlined: GCC would take new and free for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

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

Costs some_costs() {
  Costs costs;
  costs.prefill_base_s = 0.05;
  costs.prefill_per_token_s = 1e-4;
  costs.prefill_per_token_sq_s = 1e-9;
  costs.decode_base_s = 0.013;
  costs.decode_per_seq_s = 1e-4;
  costs.decode_per_context_token_s = 1e-8;
  costs.transfer_bytes_per_s = 1e10;
  costs.far_transfer_bytes_per_s = 1e9;
  costs.kv_bytes_per_token = 36864;
  costs.kv_capacity_tokens = 60000;
  return costs;
}

Table priced_table(std::size_t engines) {
  Table table(engines);
  for (std::size_t rank = 0; rank < engines; ++rank)
    table.set_costs(static_cast<std::int64_t>(rank), some_costs());
  return table;
}

Message message(std::int64_t incarnation, std::int64_t sequence, std::int64_t echo,
                double now_s = 0.0) {
  Message m;
  m.incarnation = incarnation;
  m.sequence = sequence;
  m.booking_seen = echo;
  m.now_s = now_s;
  return m;
}

void echo_moves_bookings_into_the_figures() {
  Table table(2);
  const auto first = table.book(0, Phase::Prefill, 100, 1);
  table.book(1, Phase::Decode, 10, 10);
  const auto third = table.book(0, Phase::Decode, 50, 20);
  const Tally* unseen = table.account(0).unseen;
  expect(unseen[0].prompt_tokens == 100 && unseen[1].output_tokens == 20, "all unseen");
  expect(table.hear(0, message(1, 1, first)), "news");
  expect(unseen[0].is_zero() && unseen[1].legs == 1, "the first is in the figures");
  expect(!table.hear(0, message(1, 1, third)), "the same sequence is stale");
  expect(unseen[1].legs == 1, "what is stale changes nothing");
  expect(table.hear(0, message(2, 1, 0)), "a new incarnation begins anew");
  expect(unseen[0].legs == 1 && unseen[1].legs == 1, "it has seen nothing");
  expect(table.hear(0, message(1, 9, third)), "a late message of the old one stands");
  expect(table.hear(0, message(2, 2, 0)), "until the next one of the new");
  expect(unseen[0].legs == 1 && unseen[1].legs == 1, "which has seen nothing still");
  expect(table.hear(0, message(2, 3, 1000)), "an echo of numbers never given");
  expect(unseen[0].is_zero() && unseen[1].is_zero(), "reaches the last given");
  const auto fourth = table.book(0, Phase::Decode, 7, 7);
  expect(unseen[1].legs == 1, "and no further");
  for (const auto number : {third, fourth, first, std::int64_t{2}})
    expect(table.release(number), "each is released");
  expect(table.is_idle(), "idle");
}

void leases_end() {
  Table table(2, Patience{5.0, 1.0, 10.0});
  table.book(0, Phase::Decode, 1, 1, 0, 100.0);
  const auto undated = table.book(1, Phase::Decode, 1, 1);
  expect(table.expire(104.0) == 0, "both leases run");
  expect(table.expire(106.0) == 1, "the dated one has ended");
  expect(table.expire(109.0) == 0, "the undated one was dated when first met");
  expect(table.expire(110.0) == 1, "and ends in its turn");
  expect(!table.release(undated) && table.is_idle(), "nothing is left");
}

void silence_leaves_engines_out() {
  Table table = priced_table(2);
  auto policy = make_policy("calibrated", 0, 2, {});
  table.hear(0, message(1, 1, 0, 0.0));
  table.hear(1, message(1, 1, 0, 0.0));
  for (int i = 0; i < 8; ++i) table.book(1, Phase::Decode, 1000, 1000);
  Demand demand{100, 100};
  expect(policy->pick(table, demand) == 0, "the empty engine");
  table.hear(1, message(1, 2, 0, 11.0));
  demand.now_s = 11.0;
  expect(policy->pick(table, demand) == 1, "the dead one is not chosen");
  expect(policy->scores().size() == 1, "nor a candidate");
  demand.now_s = 99.0;
  expect(policy->pick(table, demand) == 1, "unless all are: then the later heard");
  expect(policy->scores().size() == 2, "and both are candidates");
}

void terms_are_of_the_pick() {
  Table table = priced_table(3);
  PolicyOptions options;
  options.serves = Serves::Decode;
  for (const char* name : {"calibrated", "deadline", "paper"}) {
    auto policy = make_policy(name, 0, 3, options);
    table.book(1, Phase::Decode, 500, 700);
    policy->pick(table, {1000, 100});
    table.book(1, Phase::Decode, 9999, 9999);
    for (std::size_t place = 0; place < 3; ++place)
      expect(total_s(policy->terms(place)) == policy->scores()[place].value,
             "terms add up to the score, whatever was booked since");
  }
}

void two_tables_are_not_confused() {
  auto policy = make_policy("calibrated", 0, 2, {});
  Table one = priced_table(2);
  Table other = priced_table(2);
  one.book(0, Phase::Decode, 5000, 500);
  other.book(1, Phase::Decode, 5000, 500);
  for (int i = 0; i < 3; ++i) {
    expect(policy->pick(one, {100, 100}) == 1, "the first table's empty engine");
    expect(policy->pick(other, {100, 100}) == 0, "the second's");
  }
}

void refuses_what_cannot_be_priced() {
  Table table(1);
  auto policy = make_policy("calibrated", 0, 1, {});
  expect_throws<std::logic_error>([&] { policy->pick(table, {1, 1}); }, "no costs");
  Costs costs = some_costs();
  costs.decode_base_s = std::nan("");
  expect_throws<std::invalid_argument>([&] { table.set_costs(0, costs); }, "NaN");
  expect_throws<std::invalid_argument>([&] { table.set_costs(0, {}); }, "free work");
  expect_throws<std::invalid_argument>([&] { table.set_limits(0, {0, 1}); }, "slots");
  Message m = message(1, 1, 0);
  m.running = -1;
  expect_throws<std::invalid_argument>([&] { table.hear(0, m); }, "negative figure");
  expect(table.heard(0) == nullptr, "a refused message was not heard");
}

void a_queue_serves_by_deadline() {
  const double never = Demand::kNever;
  Queue queue(4);
  expect(queue.join({9.0, 9.0, 1.0}, 0.0, 4.0, 0.0).wait_s == 2.0,
         "half of who is not known goes first");
  queue.add({2.0, 2.0, 1.0});
  queue.add({8.0, 8.0, 2.0});
  queue.add({5.0, never, 1.0});
  Joined joined = queue.join({6.0, 6.0, 1.0}, 0.0, 4.0, 0.0);
  expect(joined.wait_s == 2.0 && joined.new_misses == 0, "between the second and third");
  joined = queue.join({1.0, 1.0, 1.0}, 0.0, 4.0, 0.0);
  expect(joined.wait_s == 0.0 && joined.new_misses == 0, "the first");
  joined = queue.join({1.5, 1.5, 1.5}, 0.0, 4.0, 0.0);
  expect(joined.wait_s == 0.0 && joined.new_misses == 1, "the one due at 2 is late");
  joined = queue.join({0.5, 0.5, 1.5}, 0.0, 4.0, 0.0);
  expect(joined.wait_s == 4.0 && joined.new_misses == 1, "who is late comes last");
  joined = queue.join({6.0, 6.0, 1.0}, 0.0, 4.0, 2.0);
  expect(joined.wait_s == 2.5, "half a step is under way, and part of each is done");
  joined = queue.join({6.0, 6.0, 1.0}, 0.0, 6.0, 0.0);
  expect(joined.wait_s == 3.0, "half of what others sent goes first");
}

void choices_do_not_allocate() {
  Table table = priced_table(64);
  for (int i = 0; i < 200; ++i) table.book(i % 64, Phase::Prefill, 100, 1, 0, 0.0, 1.0);
  for (const char* name : kPolicyNames) {
    for (const Serves serves : {Serves::Both, Serves::Prefill}) {
      PolicyOptions options;
      options.serves = serves;
      auto policy = make_policy(name, 16, 64, options);
      policy->pick(table, {100, 100});
      const std::size_t before = allocations;
      for (int i = 0; i < 100; ++i) {
        table.hear(16 + i % 48, message(1, i + 1, 0, 0.1 * i));
        policy->pick(table, {100 + i, 100, i, 0.2, 0.05, 0.1 * i});
      }
      expect(allocations == before, name);
    }
  }
  const std::size_t before = allocations;
  table.book(0, Phase::Decode, 1, 1);
  expect(allocations > before, "the counter counts");
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
  echo_moves_bookings_into_the_figures();
  leases_end();
  silence_leaves_engines_out();
  terms_are_of_the_pick();
  two_tables_are_not_confused();
  refuses_what_cannot_be_priced();
  a_queue_serves_by_deadline();
  choices_do_not_allocate();
  if (failures == 0) std::printf("core: all checks passed\n");
  return failures == 0 ? 0 : 1;
}
