// The Python face of the core: `vllm_calrouter._core`.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "policies.h"

namespace py = pybind11;
using namespace calrouter;

namespace {

py::tuple policy_names() {
  py::list names;
  for (const char* name : kPolicyNames) names.append(name);
  return py::tuple(names);
}

py::list scores_of(const Policy& policy) {
  py::list scores;
  for (const Score& score : policy.scores())
    scores.append(py::make_tuple(score.rank, score.value));
  return scores;
}

void bind_table(py::module_& m) {
  py::class_<Table>(m, "Table")
      .def(py::init<std::size_t>(), py::arg("engines"))
      .def_property_readonly("engines", &Table::engines)
      .def("book", &Table::book, py::arg("rank"), py::arg("phase"),
           py::arg("prompt_tokens"), py::arg("output_tokens"))
      .def("release", &Table::release, py::arg("booking"))
      .def("report", &Table::report, py::arg("rank"), py::arg("waiting"),
           py::arg("running"), py::arg("kv_usage"))
      .def(
          "legs",
          [](const Table& t, std::int64_t rank, Phase phase) {
            return t.row(rank).legs[static_cast<std::size_t>(phase)];
          },
          py::arg("rank"), py::arg("phase"))
      .def(
          "in_flight",
          [](const Table& t, std::int64_t rank) { return t.row(rank).in_flight(); },
          py::arg("rank"))
      .def(
          "prompt_tokens",
          [](const Table& t, std::int64_t rank) { return t.row(rank).prompt_tokens; },
          py::arg("rank"))
      .def(
          "output_tokens",
          [](const Table& t, std::int64_t rank) { return t.row(rank).output_tokens; },
          py::arg("rank"))
      .def("open_bookings", &Table::open_bookings)
      .def("is_idle", &Table::is_idle);
}

void bind_policy(py::module_& m) {
  py::class_<Policy>(m, "Policy")
      .def_property_readonly("name", &Policy::name)
      .def_property_readonly("begin", &Policy::begin)
      .def_property_readonly("end", &Policy::end)
      .def(
          "pick",
          [](Policy& p, Table& table, std::int64_t prompt, std::int64_t output) {
            return p.pick(table, Demand{prompt, output});
          },
          py::arg("table"), py::arg("prompt_tokens"), py::arg("output_tokens"))
      .def("scores", &scores_of)
      .def("reason", &Policy::reason);
  m.def(
      "make_policy",
      [](const std::string& name, std::size_t begin, std::size_t end, std::size_t start,
         std::int64_t routers, std::int64_t seed, std::int64_t threshold_tokens,
         double long_share) {
        return make_policy(
            name, begin, end,
            PolicyOptions{start, routers, seed, threshold_tokens, long_share});
      },
      py::arg("name"), py::arg("begin"), py::arg("end"), py::kw_only(),
      py::arg("start") = 0, py::arg("routers") = 1, py::arg("seed") = 0,
      py::arg("threshold_tokens") = 512, py::arg("long_share") = 0.5);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Load table and placement policies (C++).";
  py::native_enum<Phase>(m, "Phase", "enum.IntEnum")
      .value("PREFILL", Phase::Prefill)
      .value("DECODE", Phase::Decode)
      .finalize();
  bind_table(m);
  bind_policy(m);
  m.attr("POLICIES") = policy_names();
}
