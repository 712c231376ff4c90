// The Python face of the core: `vllm_calrouter._core`.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "policies.h"
#include "replay.h"

namespace py = pybind11;
using namespace calrouter;

namespace {

constexpr double kNoDate = std::numeric_limits<double>::quiet_NaN();

template <std::size_t N>
py::tuple names_of(const char* const (&names)[N]) {
  py::tuple result(N);
  for (std::size_t i = 0; i < N; ++i) result[i] = py::str(names[i]);
  return result;
}

py::tuple scores_of(const Policy& policy) {
  const std::vector<Score>& scores = policy.scores();
  py::tuple result(scores.size());
  for (std::size_t i = 0; i < scores.size(); ++i)
    result[i] = py::make_tuple(scores[i].rank, scores[i].value);
  return result;
}

py::dict price_at(const Policy& policy, std::size_t place) {
  const Price price = policy.terms(place);
  py::dict terms;
  for (std::size_t term = 0; term < kTerms; ++term)
    terms[kTermNames[term]] = price[term];
  return terms;
}

py::dict terms_of(const Policy& policy) {
  py::dict result;
  if (!policy.prices()) return result;
  for (std::size_t place = 0; place < policy.scores().size(); ++place)
    result[py::int_(policy.scores()[place].rank)] = price_at(policy, place);
  return result;
}

py::dict price_of_rank(const Policy& policy, std::size_t rank) {
  for (std::size_t place = 0; place < policy.scores().size(); ++place)
    if (policy.scores()[place].rank == rank) return price_at(policy, place);
  throw py::key_error("rank " + std::to_string(rank) + " was no candidate");
}

py::dict told(const Message& m) {
  using namespace pybind11::literals;
  return py::dict(
      "incarnation"_a = m.incarnation, "sequence"_a = m.sequence,
      "booking_seen"_a = m.booking_seen, "prefill_tokens"_a = m.prefill_tokens,
      "output_tokens"_a = m.output_tokens, "context_tokens"_a = m.context_tokens,
      "running"_a = m.running, "waiting"_a = m.waiting,
      "waiting_remote"_a = m.waiting_remote, "kv_total_blocks"_a = m.kv_total_blocks,
      "kv_free_blocks"_a = m.kv_free_blocks, "kv_pinned_blocks"_a = m.kv_pinned_blocks,
      "block_tokens"_a = m.block_tokens, "now_s"_a = m.now_s,
      "step_age_s"_a = m.step_age_s);
}

/// By phase, so that `unseen["legs"][Phase.DECODE]` reads as it is meant.
py::dict unseen_of(const Account& account) {
  using namespace pybind11::literals;
  const Tally* t = account.unseen;
  return py::dict(
      "legs"_a = py::make_tuple(t[0].legs, t[1].legs),
      "prompt_tokens"_a = py::make_tuple(t[0].prompt_tokens, t[1].prompt_tokens),
      "output_tokens"_a = py::make_tuple(t[0].output_tokens, t[1].output_tokens));
}

Serves serves_of(const std::optional<Phase>& phase) {
  if (!phase) return Serves::Both;
  return *phase == Phase::Prefill ? Serves::Prefill : Serves::Decode;
}

void bind_costs(py::module_& m) {
  py::class_<Costs>(m, "Costs")
      .def(py::init([](double prefill_base_s, double prefill_per_token_s,
                       double prefill_per_token_sq_s, double decode_base_s,
                       double decode_per_seq_s, double decode_per_context_token_s,
                       double transfer_base_s, double transfer_bytes_per_s,
                       std::int64_t kv_bytes_per_token, std::int64_t kv_capacity_tokens,
                       std::optional<double> far_transfer_base_s,
                       std::optional<double> far_transfer_bytes_per_s) {
             const Costs costs{prefill_base_s,     prefill_per_token_s,
                               prefill_per_token_sq_s, decode_base_s,
                               decode_per_seq_s,   decode_per_context_token_s,
                               transfer_base_s,    transfer_bytes_per_s,
                               kv_bytes_per_token, kv_capacity_tokens,
                               far_transfer_base_s.value_or(transfer_base_s),
                               far_transfer_bytes_per_s.value_or(transfer_bytes_per_s)};
             costs.check();
             return costs;
           }),
           py::kw_only(), py::arg("prefill_base_s"), py::arg("prefill_per_token_s"),
           py::arg("prefill_per_token_sq_s"), py::arg("decode_base_s"),
           py::arg("decode_per_seq_s"), py::arg("decode_per_context_token_s"),
           py::arg("transfer_base_s"), py::arg("transfer_bytes_per_s"),
           py::arg("kv_bytes_per_token"), py::arg("kv_capacity_tokens"),
           py::arg("far_transfer_base_s") = py::none(),
           py::arg("far_transfer_bytes_per_s") = py::none())
      .def_readonly("prefill_base_s", &Costs::prefill_base_s)
      .def_readonly("prefill_per_token_s", &Costs::prefill_per_token_s)
      .def_readonly("prefill_per_token_sq_s", &Costs::prefill_per_token_sq_s)
      .def_readonly("decode_base_s", &Costs::decode_base_s)
      .def_readonly("decode_per_seq_s", &Costs::decode_per_seq_s)
      .def_readonly("decode_per_context_token_s", &Costs::decode_per_context_token_s)
      .def_readonly("transfer_base_s", &Costs::transfer_base_s)
      .def_readonly("transfer_bytes_per_s", &Costs::transfer_bytes_per_s)
      .def_readonly("kv_bytes_per_token", &Costs::kv_bytes_per_token)
      .def_readonly("kv_capacity_tokens", &Costs::kv_capacity_tokens)
      .def_readonly("far_transfer_base_s", &Costs::far_transfer_base_s)
      .def_readonly("far_transfer_bytes_per_s", &Costs::far_transfer_bytes_per_s);
}

bool hear(Table& table, std::int64_t rank, std::int64_t incarnation,
          std::int64_t sequence, std::int64_t booking_seen, std::int64_t prefill_tokens,
          std::int64_t output_tokens, std::int64_t context_tokens, std::int64_t running,
          std::int64_t waiting, std::int64_t waiting_remote,
          std::int64_t kv_total_blocks, std::int64_t kv_free_blocks,
          std::int64_t kv_pinned_blocks, std::int64_t block_tokens, double now_s,
          double step_age_s) {
  return table.hear(
      rank, Message{incarnation, sequence, booking_seen, prefill_tokens, output_tokens,
                    context_tokens, running, waiting, waiting_remote, kv_total_blocks,
                    kv_free_blocks, kv_pinned_blocks, block_tokens, now_s, step_age_s});
}

void bind_ledger(py::class_<Table>& table) {
  const auto open = [](const Table& t, std::int64_t rank, Phase phase) -> const Tally& {
    return t.account(rank).open[static_cast<std::size_t>(phase)];
  };
  table
      .def("book", &Table::book, py::arg("rank"), py::arg("phase"),
           py::arg("prompt_tokens"), py::arg("output_tokens"), py::kw_only(),
           py::arg("cached_tokens") = 0, py::arg("now_s") = kNoDate,
           py::arg("due_s") = Demand::kNever)
      .def("release", &Table::release, py::arg("booking"))
      .def("expire", &Table::expire, py::arg("now_s"))
      .def(
          "legs",
          [open](const Table& t, std::int64_t rank, Phase phase) {
            return open(t, rank, phase).legs;
          },
          py::arg("rank"), py::arg("phase"))
      .def("in_flight", &Table::in_flight, py::arg("rank"))
      .def(
          "prompt_tokens",
          [open](const Table& t, std::int64_t rank) {
            return open(t, rank, Phase::Prefill).prompt_tokens +
                   open(t, rank, Phase::Decode).prompt_tokens;
          },
          py::arg("rank"))
      .def(
          "output_tokens",
          [open](const Table& t, std::int64_t rank) {
            return open(t, rank, Phase::Prefill).output_tokens +
                   open(t, rank, Phase::Decode).output_tokens;
          },
          py::arg("rank"))
      .def("open_bookings", &Table::open_bookings)
      .def("is_idle", &Table::is_idle);
}

void bind_table(py::module_& m) {
  const Patience patience;
  py::class_<Table> table(m, "Table");
  table
      .def(py::init([](std::size_t engines, double lease_s, double silent_s,
                       double stale_s, double dead_s) {
             return Table(engines, Patience{lease_s, silent_s, stale_s, dead_s});
           }),
           py::arg("engines"), py::kw_only(), py::arg("lease_s") = patience.lease_s,
           py::arg("silent_s") = patience.silent_s, py::arg("stale_s") = patience.stale_s,
           py::arg("dead_s") = patience.dead_s)
      .def_property_readonly("engines", &Table::engines)
      .def("hear", &hear, py::arg("rank"), py::kw_only(), py::arg("incarnation"),
           py::arg("sequence"), py::arg("booking_seen"), py::arg("prefill_tokens"),
           py::arg("output_tokens"), py::arg("context_tokens"), py::arg("running"),
           py::arg("waiting"), py::arg("waiting_remote"), py::arg("kv_total_blocks"),
           py::arg("kv_free_blocks"), py::arg("kv_pinned_blocks"),
           py::arg("block_tokens"), py::arg("now_s"), py::arg("step_age_s") = 0.0)
      .def("silence_s", &Table::silence_s, py::arg("rank"), py::arg("now_s"))
      .def(
          "heard",
          [](const Table& t, std::int64_t rank) -> py::object {
            const Message* message = t.heard(rank);
            if (!message) return py::none();
            return told(*message);
          },
          py::arg("rank"))
      .def(
          "unseen",
          [](const Table& t, std::int64_t rank) { return unseen_of(t.account(rank)); },
          py::arg("rank"))
      .def("set_costs", &Table::set_costs, py::arg("rank"), py::arg("costs"))
      .def(
          "set_limits",
          [](Table& t, std::int64_t rank, std::int64_t seqs, std::int64_t tokens) {
            t.set_limits(rank, Limits{seqs, tokens});
          },
          py::arg("rank"), py::kw_only(), py::arg("max_num_seqs"),
          py::arg("max_num_batched_tokens"))
      .def("set_host", &Table::set_host, py::arg("rank"), py::arg("host"))
      .def("report", &Table::report, py::arg("rank"), py::arg("waiting"),
           py::arg("running"), py::arg("kv_usage"));
  bind_ledger(table);
}

/// Token ids of a list, into a vector that is used again.
void read_ids(const py::list& prompt, std::vector<std::int64_t>& ids) {
  ids.clear();
  ids.reserve(prompt.size());
  for (const py::handle& id : prompt) {
    ids.push_back(PyLong_AsLongLong(id.ptr()));
    if (ids.back() == -1 && PyErr_Occurred()) throw py::error_already_set();
  }
}

void bind_prefixes(py::module_& m) {
  py::class_<Prefixes>(m, "Prefixes")
      .def(py::init<std::size_t>(), py::arg("engines"))
      .def(
          "look",
          [ids = std::vector<std::int64_t>()](Prefixes& p, const Table& table,
                                              std::int64_t salt,
                                              const py::list& prompt) mutable {
            read_ids(prompt, ids);
            p.look(table, static_cast<std::uint64_t>(salt), ids);
          },
          py::arg("table"), py::arg("salt"), py::arg("prompt"))
      .def(
          "keep",
          [](Prefixes& p, const Table& table, std::int64_t rank) {
            p.keep(table, rank, kv_capacity_tokens(table.engine(rank)));
          },
          py::arg("table"), py::arg("rank"))
      .def(
          "cached_tokens",
          [](const Prefixes& p, std::size_t rank) {
            if (rank >= p.engines()) throw py::index_error("no such engine");
            return p.cached_tokens(rank);
          },
          py::arg("rank"))
      .def("chunks", &Prefixes::chunks, py::arg("rank"))
      .def("clear", &Prefixes::clear)
      .def_property_readonly("engines", &Prefixes::engines);
  m.attr("PREFIX_CHUNK_TOKENS") = Prefixes::kChunkTokens;
}

void bind_policy(py::module_& m) {
  const auto pick = [](Policy& p, Table& table, std::int64_t prompt, std::int64_t output,
                       std::int64_t cached, double slo_ttft_s, double slo_tpot_s,
                       double now_s, std::int64_t source_rank,
                       const Prefixes* prefixes, double due_s) {
    return p.pick(table, Demand{prompt, output, cached, slo_ttft_s, slo_tpot_s, now_s,
                                source_rank, prefixes, due_s});
  };
  const auto decide = [pick](Policy& p, Table& table, std::int64_t prompt,
                             std::int64_t output, std::int64_t cached,
                             double slo_ttft_s, double slo_tpot_s, double now_s,
                             std::int64_t source_rank, const Prefixes* prefixes,
                             double due_s) {
    const std::size_t rank = pick(p, table, prompt, output, cached, slo_ttft_s,
                                  slo_tpot_s, now_s, source_rank, prefixes, due_s);
    return py::make_tuple(rank, p.reason(), scores_of(p));
  };
  py::class_<Policy>(m, "Policy")
      .def_property_readonly("name", &Policy::name)
      .def_property_readonly("begin", &Policy::begin)
      .def_property_readonly("end", &Policy::end)
      .def("pick", pick, py::arg("table"), py::arg("prompt_tokens"),
           py::arg("output_tokens"), py::kw_only(), py::arg("cached_tokens") = 0,
           py::arg("slo_ttft_s") = 0.0, py::arg("slo_tpot_s") = 0.0,
           py::arg("now_s") = 0.0, py::arg("source_rank") = Demand::kNowhere,
           py::arg("prefixes") = py::none(), py::arg("due_s") = Demand::kNever)
      .def("decide", decide, py::arg("table"), py::arg("prompt_tokens"),
           py::arg("output_tokens"), py::kw_only(), py::arg("cached_tokens") = 0,
           py::arg("slo_ttft_s") = 0.0, py::arg("slo_tpot_s") = 0.0,
           py::arg("now_s") = 0.0, py::arg("source_rank") = Demand::kNowhere,
           py::arg("prefixes") = py::none(), py::arg("due_s") = Demand::kNever)
      .def("scores", &scores_of)
      .def("terms", &terms_of)
      .def("price", &price_of_rank, py::arg("rank"))
      .def("reason", &Policy::reason);
  const PolicyOptions defaults;
  m.def(
      "make_policy",
      [](const std::string& name, std::size_t begin, std::size_t end, std::size_t start,
         std::int64_t routers, std::int64_t seed, std::int64_t threshold_tokens,
         double long_share, const std::optional<Phase>& serves, double slot_weight,
         double kv_weight, double slo_weight) {
        return make_policy(
            name, begin, end,
            PolicyOptions{start, routers, seed, threshold_tokens, long_share,
                          serves_of(serves), Weights{slot_weight, kv_weight, slo_weight}});
      },
      py::arg("name"), py::arg("begin"), py::arg("end"), py::kw_only(),
      py::arg("start") = defaults.start, py::arg("routers") = defaults.routers,
      py::arg("seed") = defaults.seed,
      py::arg("threshold_tokens") = defaults.threshold_tokens,
      py::arg("long_share") = defaults.long_share, py::arg("serves") = py::none(),
      py::arg("slot_weight") = defaults.weights.slot,
      py::arg("kv_weight") = defaults.weights.kv,
      py::arg("slo_weight") = defaults.weights.slo);
}

/// Message as `Table.heard` gives it, in a dict with its rank.
Message message_of(const py::dict& d) {
  const auto whole = [&d](const char* key) { return d[key].cast<std::int64_t>(); };
  return Message{whole("incarnation"),      whole("sequence"),
                 whole("booking_seen"),     whole("prefill_tokens"),
                 whole("output_tokens"),    whole("context_tokens"),
                 whole("running"),          whole("waiting"),
                 whole("waiting_remote"),   whole("kv_total_blocks"),
                 whole("kv_free_blocks"),   whole("kv_pinned_blocks"),
                 whole("block_tokens"),     d["now_s"].cast<double>(),
                 d.contains("step_age_s") ? d["step_age_s"].cast<double>() : 0.0};
}

void bind_replay(py::module_& m) {
  m.def(
      "replay",
      [](Table& table, Policy& prefill, Policy& decode, const py::list& script,
         std::size_t under_way, bool all_new) {
        std::vector<Happening> happenings;
        for (const py::handle& item : script) {
          const auto [heard, prompt, output, now_s, due_s] =
              item.cast<std::tuple<std::optional<py::dict>, std::int64_t, std::int64_t,
                                   double, double>>();
          Happening next;
          next.demand.prompt_tokens = prompt;
          next.demand.output_tokens = output;
          next.demand.now_s = now_s;
          next.demand.due_s = due_s;
          if (heard) next.heard = {(*heard)["rank"].cast<std::int64_t>(), message_of(*heard)};
          happenings.push_back(next);
        }
        Replayed result = replay(table, prefill, decode, happenings, under_way, all_new);
        return py::make_tuple(std::move(result.picks), std::move(result.seconds));
      },
      py::arg("table"), py::arg("prefill"), py::arg("decode"), py::arg("script"),
      py::kw_only(), py::arg("under_way"), py::arg("all_new") = false);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Load table and placement policies (C++).";
  py::native_enum<Phase>(m, "Phase", "enum.IntEnum")
      .value("PREFILL", Phase::Prefill)
      .value("DECODE", Phase::Decode)
      .finalize();
  bind_costs(m);
  bind_table(m);
  bind_prefixes(m);
  bind_policy(m);
  bind_replay(m);
  m.attr("POLICIES") = names_of(kPolicyNames);
  m.attr("TERMS") = names_of(kTermNames);
}
