#include "oe_runtime/core/client/client.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/optimizer/optimizer_spec.h"
#include "oe_runtime/core/wire/errors.h"

namespace py = pybind11;

namespace oe {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;
using Ids = py::array_t<int64_t, py::array::c_style>;

struct Increments {
  Increments() = default;
  Increments(const Increments&) = delete;
  Increments& operator=(const Increments&) = delete;
  std::vector<Increment> of_servers;
};

// One group of a pull. The arrays are views of C++ memory that stays while any of them does.
struct GroupView {
  std::shared_ptr<PulledBatch> batch;
  size_t number;

  const PlannedGroup& group() const { return batch->plan.groups[number]; }
  py::capsule Owner() const {
    auto* owner = new std::shared_ptr<PulledBatch>(batch);
    return {owner, [](void* pointer) { delete static_cast<std::shared_ptr<PulledBatch>*>(pointer); }};
  }
  py::array Rows() const {
    const std::vector<size_t> shape = {group().rows, static_cast<size_t>(group().dim)};
    if (group().is_float64) return py::array_t<double>(shape, batch->rows[number].as<double>(), Owner());
    return py::array_t<float>(shape, batch->rows[number].as<float>(), Owner());
  }
  py::array Inverse() const {
    return py::array_t<int32_t>(static_cast<py::ssize_t>(group().inverse.size()), group().inverse.data(),
                                Owner());
  }
};

// Of each table its id, the keys that the batch has of it, and the places of their rows in the group: one
// range after the other.
py::list TablesOfGroup(const GroupView& view) {
  const BatchPlan& plan = view.batch->plan;
  py::list tables;
  for (const PlannedTable& table : view.group().tables) {
    const ShardedKeys& keys = plan.keys[table.keys];
    std::vector<std::pair<size_t, size_t>> ranges;
    for (uint32_t server = 0; server < plan.servers; ++server) {
      const size_t begin = table.offsets[server];
      const size_t end = begin + keys.on(server);
      if (begin == end) continue;
      if (!ranges.empty() && ranges.back().second == begin) {
        ranges.back().second = end;
      } else {
        ranges.emplace_back(begin, end);
      }
    }
    const auto* data = reinterpret_cast<const int64_t*>(keys.keys.data());
    const py::array_t<int64_t> array(static_cast<py::ssize_t>(keys.keys.size()), data, view.Owner());
    tables.append(py::make_tuple(table.table, array, ranges));
  }
  return tables;
}

std::vector<IdsView> ViewsOf(const std::vector<Ids>& arrays) {
  std::vector<IdsView> views;
  for (const Ids& ids : arrays) {
    views.push_back({reinterpret_cast<const Key*>(ids.data()), static_cast<size_t>(ids.size())});
  }
  return views;
}

std::shared_ptr<PulledBatch> Pull(Client& client, const std::vector<Ids>& ids,
                                  const std::vector<std::pair<uint32_t, uint32_t>>& lookups) {
  const std::vector<IdsView> views = ViewsOf(ids);
  const py::gil_scoped_release release;
  return client.Pull(views, lookups);
}

std::shared_ptr<PulledBatch> Plan(Client& client, const std::vector<Ids>& ids,
                                  const std::vector<std::pair<uint32_t, uint32_t>>& lookups) {
  const std::vector<IdsView> views = ViewsOf(ids);
  const py::gil_scoped_release release;
  return client.Plan(views, lookups);
}

// A float64 array where float32 is expected is no small matter that a cast could settle: it is a mistake in
// the model's dtypes, or costs a pass over the memory in each step.
void CheckDtype(const Client& client, const PulledBatch& pulled, size_t g, const py::array& gradients) {
  if (g >= pulled.plan.groups.size()) return;  // Client::Push refuses it
  const PlannedGroup& group = pulled.plan.groups[g];
  const char* wanted = group.is_float64 ? "float64" : "float32";
  if (group.is_float64 ? py::isinstance<py::array_t<double>>(gradients)
                       : py::isinstance<py::array_t<float>>(gradients)) {
    return;
  }
  std::string tables;
  for (const PlannedTable& table : group.tables) {
    const TableSpec spec = client.Spec(table.table);
    tables += (tables.empty() ? "'" : ", '") + spec.name + "' of " + spec.dtype;
  }
  throw SpecError("gradients of group " + std::to_string(g) + " are " +
                  py::str(gradients.dtype()).cast<std::string>() + "; expected " + wanted + " (table " +
                  tables + ")");
}

// Views of arrays of which some may be None; `kept` has those that are not contiguous in a copy.
std::vector<GradientView> ViewsOf(const Client& client, const PulledBatch& pulled,
                                  const std::vector<py::object>& gradients, std::vector<py::array>* kept) {
  std::vector<GradientView> views;
  for (size_t g = 0; g < gradients.size(); ++g) {
    views.emplace_back();
    if (gradients[g].is_none()) continue;
    const auto array = gradients[g].cast<py::array>();
    CheckDtype(client, pulled, g, array);
    const bool by_example = array.ndim() == 3;
    if (array.ndim() != 2 && !by_example) {
      throw SpecError("gradients of group " + std::to_string(g) + " have " + std::to_string(array.ndim()) +
                      " dimensions; expected two, or three (examples, lookups, dim)");
    }
    const bool known = g < pulled.plan.groups.size();
    if (by_example && known && static_cast<size_t>(array.shape(1)) != pulled.plan.groups[g].lookups.size()) {
      throw SpecError("gradients of group " + std::to_string(g) + " are of " +
                      std::to_string(array.shape(1)) + " lookups; the group has " +
                      std::to_string(pulled.plan.groups[g].lookups.size()));
    }
    kept->push_back(py::array::ensure(array, py::array::c_style));
    const auto dim = static_cast<size_t>(array.shape(array.ndim() - 1));
    const auto examples = static_cast<size_t>(array.shape(0));
    views[g] = {kept->back().data(), by_example ? examples * static_cast<size_t>(array.shape(1)) : examples,
                dim, by_example};
  }
  return views;
}

void Push(Client& client, PulledBatch& pulled, const std::vector<py::object>& of_ids,
          const std::vector<py::object>& of_rows, const std::vector<double>& learning_rates) {
  std::vector<py::array> kept;
  const std::vector<GradientView> ids = ViewsOf(client, pulled, of_ids, &kept);
  const std::vector<GradientView> rows = ViewsOf(client, pulled, of_rows, &kept);
  const py::gil_scoped_release release;
  client.Push(pulled, ids, learning_rates, rows);
}

py::array_t<int32_t> ArrayOf(std::vector<int32_t>&& numbers) {
  auto* owner = new std::vector<int32_t>(std::move(numbers));
  const py::capsule capsule(owner, [](void* pointer) { delete static_cast<std::vector<int32_t>*>(pointer); });
  return py::array_t<int32_t>(static_cast<py::ssize_t>(owner->size()), owner->data(), capsule);
}

py::tuple PairsOf(Client& client, const GroupView& group) {
  Pairs pairs;
  {
    const py::gil_scoped_release release;
    pairs = client.PairsOf(group.group());
  }
  return py::make_tuple(ArrayOf(std::move(pairs.rows)), ArrayOf(std::move(pairs.sizes)),
                        ArrayOf(std::move(pairs.of_ids)), ArrayOf(std::move(pairs.examples)),
                        ArrayOf(std::move(pairs.pairs)));
}

// An array in memory of the core's, which is used again where the system would have to clear new pages.
py::array ArrayIn(Buffer&& memory, bool is_float64, const std::vector<size_t>& shape) {
  auto* owner = new Buffer(std::move(memory));
  const py::capsule capsule(owner, [](void* pointer) { delete static_cast<Buffer*>(pointer); });
  if (is_float64) return py::array_t<double>(shape, owner->as<double>(), capsule);
  return py::array_t<float>(shape, owner->as<float>(), capsule);
}

// `out` is None, or the array that is to be filled.
py::array Embeddings(Client& client, const GroupView& group, const py::object& out) {
  const PlannedGroup& of = group.group();
  const std::vector<size_t> shape = {of.inverse.size(), static_cast<size_t>(of.dim)};
  py::array result;
  if (out.is_none()) {
    result = ArrayIn(Buffer(of.inverse.size() * of.row_bytes()), of.is_float64, shape);
  } else {
    const bool known = of.is_float64 ? py::isinstance<py::array_t<double, py::array::c_style>>(out)
                                     : py::isinstance<py::array_t<float, py::array::c_style>>(out);
    if (known) result = out.cast<py::array>();
    if (!known || result.ndim() != 2 || static_cast<size_t>(result.shape(0)) != shape[0] ||
        static_cast<size_t>(result.shape(1)) != shape[1] || !result.writeable()) {
      throw SpecError("'out' is not a contiguous " + std::string(of.is_float64 ? "float64" : "float32") +
                      " array of shape (" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) +
                      ") that may be written to");
    }
  }
  void* const data = result.mutable_data();
  const py::gil_scoped_release release;
  client.Embeddings(*group.batch, group.number, data);
  return result;
}

// An array of rows whose values are not set.
py::array Empty(size_t rows, size_t columns, bool is_float64) {
  const size_t bytes = is_float64 ? sizeof(double) : sizeof(float);
  return ArrayIn(Buffer(rows * columns * bytes), is_float64, {rows, columns});
}

// Of a lookup: the offsets of its bags, the weights of its ids or None, and whether bags are means.
using LookupBags = std::tuple<Ids, py::object, bool>;

bool IsArrayOf(const PlannedGroup& group, const py::object& array) {
  return group.is_float64 ? py::isinstance<py::array_t<double>>(array)
                          : py::isinstance<py::array_t<float>>(array);
}

SpecError NotOf(const PlannedGroup& group, size_t lookup, const char* what, const std::string& shape) {
  return SpecError("lookup " + std::to_string(group.lookups[lookup].lookup) + ": the " + what +
                   " are not a " + (group.is_float64 ? "float64" : "float32") + " array of shape " + shape);
}

// `pooled`: of each lookup an array (bags, dim) whose rows may be far from each other.
std::vector<Bags> BagsOf(const PlannedGroup& group, const std::vector<LookupBags>& lookups,
                         const std::vector<py::array>& pooled) {
  if (lookups.size() != group.lookups.size() || pooled.size() != lookups.size()) {
    throw SpecError("bags of " + std::to_string(lookups.size()) + " lookups and " +
                    std::to_string(pooled.size()) + " arrays for them; the group has " +
                    std::to_string(group.lookups.size()) + " lookups");
  }
  std::vector<Bags> bags;
  const size_t value = group.row_bytes() / group.dim;
  for (size_t l = 0; l < lookups.size(); ++l) {
    const auto& [offsets, weights, mean] = lookups[l];
    if (offsets.ndim() != 1 || offsets.size() == 0) throw SpecError("bags have at least one offset");
    Bags one{offsets.data(), static_cast<size_t>(offsets.size()) - 1};
    one.mean = mean;
    if (!weights.is_none()) {
      const size_t ids = group.lookups[l].size;
      if (!IsArrayOf(group, weights)) throw NotOf(group, l, "weights", "(" + std::to_string(ids) + ",)");
      const auto array = weights.cast<py::array>();
      if (array.ndim() != 1 || static_cast<size_t>(array.size()) != ids ||
          (ids > 1 && static_cast<size_t>(array.strides(0)) != value)) {
        throw NotOf(group, l, "weights", "(" + std::to_string(ids) + ",)");
      }
      one.weights = array.data();
    }
    const py::array& of = pooled[l];
    const std::string shape = "(" + std::to_string(one.count) + ", " + std::to_string(group.dim) + ")";
    if (!IsArrayOf(group, of) || of.ndim() != 2 || static_cast<size_t>(of.shape(0)) != one.count ||
        static_cast<size_t>(of.shape(1)) != group.dim ||
        (one.count > 0 && group.dim > 1 && static_cast<size_t>(of.strides(1)) != value) ||
        (one.count > 1 && (of.strides(0) < 0 || static_cast<size_t>(of.strides(0)) % value != 0))) {
      throw NotOf(group, l, "embeddings of bags", shape);
    }
    one.pooled = const_cast<void*>(of.data());
    one.stride = one.count > 1 ? static_cast<size_t>(of.strides(0)) / value : group.dim;
    bags.push_back(one);
  }
  CheckBags(group, bags);
  return bags;
}

void PoolBagsOf(Client& client, const GroupView& group, const std::vector<LookupBags>& lookups,
                const std::vector<py::array>& pooled) {
  for (const py::array& one : pooled) {
    if (!one.writeable()) throw SpecError("the embeddings of bags go to an array that may not be written to");
  }
  const std::vector<Bags> bags = BagsOf(group.group(), lookups, pooled);
  const py::gil_scoped_release release;
  client.PoolBags(*group.batch, group.number, bags);
}

py::array SumBagsOf(Client& client, const GroupView& group, const std::vector<LookupBags>& lookups,
                    const std::vector<py::array>& gradients) {
  const PlannedGroup& of = group.group();
  const std::vector<Bags> bags = BagsOf(of, lookups, gradients);
  py::array sums = Empty(of.rows, of.dim, of.is_float64);
  void* const data = sums.mutable_data();
  const py::gil_scoped_release release;
  client.SumBags(*group.batch, group.number, bags, data);
  return sums;
}

py::array PullRows(Client& client, uint32_t table, const Ids& keys) {
  const TableSpec spec = client.Spec(table);
  const auto n = static_cast<size_t>(keys.size());
  const auto* data = reinterpret_cast<const Key*>(keys.data());
  Buffer rows;
  {
    const py::gil_scoped_release release;
    rows = client.NewBuffer(n * spec.dim * ValueBytes(DtypeOf(spec)));
    client.PullRows(table, data, n, rows.data());
  }
  return ArrayIn(std::move(rows), DtypeOf(spec) == Dtype::kFloat64, {n, spec.dim});
}

// Rows as the table's dtype has them, of n keys; another dtype is a mistake that no cast should hide. Returns
// their stride (RowStrides): they may be columns of a wider array.
size_t RequireRows(const TableSpec& spec, const py::array& array, size_t n, size_t of_key, const char* what) {
  const bool is_float64 = DtypeOf(spec) == Dtype::kFloat64;
  const bool known = is_float64 ? py::isinstance<py::array_t<double, 0>>(array)
                                : py::isinstance<py::array_t<float, 0>>(array);
  if (known && array.ndim() == 2 && static_cast<size_t>(array.shape(0)) == n &&
      static_cast<size_t>(array.shape(1)) == of_key) {
    const auto unit = static_cast<py::ssize_t>(ValueBytes(DtypeOf(spec)));
    const auto least = static_cast<py::ssize_t>(of_key) * unit;
    if (n * of_key == 0) return 0;
    const py::ssize_t stride = n == 1 ? least : array.strides(0);
    const bool aligned = reinterpret_cast<uintptr_t>(array.data()) % static_cast<size_t>(unit) == 0;
    if ((of_key == 1 || array.strides(1) == unit) && stride >= least && stride % unit == 0 && aligned) {
      return static_cast<size_t>(stride);
    }
    throw SpecError("table '" + spec.name + "': the " + what +
                    " of a key do not lie one after the other in " +
                    "memory; make the array contiguous, or take it from columns of one that is");
  }
  throw SpecError("table '" + spec.name + "': the " + what + " are " +
                  py::str(array.dtype()).cast<std::string>() + " of shape " +
                  py::str(array.attr("shape")).cast<std::string>() + "; expected " +
                  (is_float64 ? "float64" : "float32") + " of shape (" + std::to_string(n) + ", " +
                  std::to_string(of_key) + ")");
}

// Rows by key, as Python brings them: checked for their shapes.
struct RowArrays {
  size_t n = 0;
  const Key* keys = nullptr;
  const void* weights = nullptr;
  const void* states = nullptr;
  RowStrides strides;

  // `states` is None or the optimizer's state of each row.
  RowArrays(const Client& client, uint32_t table, const Ids& ids, const py::array& rows,
            const py::object& slots)
      : n(static_cast<size_t>(ids.size())),
        keys(reinterpret_cast<const Key*>(ids.data())),
        weights(rows.data()) {
    const TableSpec spec = client.Spec(table);
    strides.weights = RequireRows(spec, rows, n, spec.dim, "rows");
    if (slots.is_none()) return;
    const auto of_slots = slots.cast<py::array>();
    strides.states = RequireRows(spec, of_slots, n, client.StateValues(table), "slots");
    states = of_slots.data();
  }
};

// Throws what Client::Assign would throw, but for keys that are there twice.
void CheckRows(Client& client, uint32_t table, const Ids& keys, const py::array& weights,
               const py::object& states) {
  const RowArrays rows(client, table, keys, weights, states);
  const py::gil_scoped_release release;
  client.CheckRows(table, rows.keys, rows.n, rows.weights, rows.states, rows.strides);
}

py::tuple Assign(Client& client, uint32_t table, const Ids& keys, const py::array& weights,
                 const py::object& states) {
  const RowArrays rows(client, table, keys, weights, states);
  Table::AssignCounts counts;
  {
    const py::gil_scoped_release release;
    counts = client.Assign(table, rows.keys, rows.n, rows.weights, rows.states, rows.strides);
  }
  return py::make_tuple(counts.created, counts.evicted, counts.no_room);
}

uint64_t Erase(Client& client, uint32_t table, const Ids& keys) {
  const auto n = static_cast<size_t>(keys.size());
  const auto* data = reinterpret_cast<const Key*>(keys.data());
  const py::gil_scoped_release release;
  return client.Erase(table, data, n);
}

// Which keys have rows, (n, dim) weights and (n, state values) of the optimizer of all: in the caller's
// arrays, or new ones where `weights` is None. Where only `states` is, they are not read.
py::tuple ReadRows(Client& client, uint32_t table, const Ids& keys, py::object weights, py::object states) {
  if (weights.is_none()) {
    const TableSpec spec = client.Spec(table);
    const auto n = static_cast<size_t>(keys.size());
    const auto make = [&](size_t of_key) {
      return ArrayIn(Buffer(n * of_key * ValueBytes(DtypeOf(spec))), DtypeOf(spec) == Dtype::kFloat64,
                     {n, of_key});
    };
    weights = make(spec.dim);
    states = make(client.StateValues(table));
  }
  auto of_weights = weights.cast<py::array>();
  const RowArrays rows(client, table, keys, of_weights, states);
  py::array_t<bool> found(static_cast<py::ssize_t>(rows.n));
  auto* of_found = reinterpret_cast<uint8_t*>(found.mutable_data());
  void* const to_weights = of_weights.mutable_data();  // throws where it may not be written to
  void* const to_states = rows.states == nullptr ? nullptr : states.cast<py::array>().mutable_data();
  {
    const py::gil_scoped_release release;
    client.ReadRows(table, rows.keys, rows.n, to_weights, to_states, of_found, rows.strides);
  }
  return py::make_tuple(found, weights, states);
}

// A (rows, columns) array in memory that servers of this host see, too, if there is room for it.
py::array NewArray(Client& client, size_t rows, size_t columns, bool is_float64) {
  return ArrayIn(client.NewBuffer(rows * columns * (is_float64 ? sizeof(double) : sizeof(float))), is_float64,
                 {rows, columns});
}

std::vector<std::pair<std::string, size_t>> SlotsOfTable(const Client& client, uint32_t table) {
  const TableSpec spec = client.Spec(table);
  std::vector<std::pair<std::string, size_t>> slots;
  for (const OptimizerSlot& slot : SlotsOf(spec.optimizer, spec.dim))
    slots.emplace_back(slot.name, slot.values);
  return slots;
}

// Of one part, or without one, of all.
py::array KeysOf(Client& client, uint32_t table, std::optional<uint32_t> part) {
  std::vector<Key> keys;
  {
    const py::gil_scoped_release release;
    keys = part ? client.Keys(table, *part) : client.Keys(table);
  }
  return py::array_t<int64_t>(static_cast<py::ssize_t>(keys.size()),
                              reinterpret_cast<const int64_t*>(keys.data()));
}

std::unique_ptr<Client> InProcess(const std::string& storage, uint32_t servers, unsigned threads) {
  const auto spec = nlohmann::json::parse(storage).get<StorageSpec>();
  const py::gil_scoped_release release;
  return Client::InProcess(spec, servers, threads);
}

std::unique_ptr<Client> Connect(const std::vector<std::string>& endpoints, const std::string& token,
                                double timeout, unsigned threads, bool wire_checkpoints,
                                const std::string& tls, const std::string& job, const std::string& worker,
                                bool read_only, bool share_memory, uint32_t of) {
  RemoteOptions options;
  options.endpoints = endpoints;
  options.of = of;
  options.token = token;
  options.job = job;
  if (!worker.empty()) options.worker = WorkerSpecFromJsonText(worker);
  options.read_only = read_only;
  options.share_memory = share_memory;
  options.tls = ParseTlsMode(tls);
  options.timeout = timeout;
  options.wire_checkpoints = wire_checkpoints;
  options.check_interrupt = [] {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  const py::gil_scoped_release release;
  return Client::Connect(options, threads);
}

// Without a version to replace, a read. The version, whether it was written, this client's number, all
// members' numbers, and the value: None if there is none, or if it was written.
py::tuple ExchangeShared(Client& client, const std::string& name, std::optional<uint64_t> replaces,
                         const std::string& value) {
  SharedRequest request;
  request.name = name;
  request.write = replaces.has_value();
  request.version = replaces.value_or(0);
  request.value = {reinterpret_cast<const uint8_t*>(value.data()), value.size()};
  SharedReply reply;
  {
    const py::gil_scoped_release release;
    reply = client.ExchangeShared(request);
  }
  py::object found = py::none();
  if (reply.value != nullptr) found = py::bytes(*reply.value);
  return py::make_tuple(reply.version, reply.written, reply.client, reply.members, found);
}

// Calls a method without the GIL.
template <typename Function>
auto Released(Function function) {
  const py::gil_scoped_release release;
  return function();
}

void BindIncrements(py::module_& module) {
  py::class_<Increments>(module, "Increment", "The files of a save that Client.apply_increment takes.");
  module.def(
      "read_increment",
      [](const std::string& directory, const std::vector<std::string>& tables, uint32_t servers,
         const std::string& row_precision) {
        auto read = std::make_unique<Increments>();
        for (uint32_t server = 0; server < servers; ++server) {
          read->of_servers.push_back(ReadIncrement(directory, tables, {server, servers}, row_precision));
        }
        return read;
      },
      Release(), py::arg("directory"), py::arg("tables"), py::arg("servers"), py::arg("row_precision") = "",
      "Reads the tables' files of all servers, compares every checksum, and refuses a row that a storage of\n"
      "this row_precision cannot keep.");
}

void BindPulled(py::module_& module) {
  py::class_<GroupView>(module, "Group", "The rows of all tables of one dim that a pull brought.")
      .def_property_readonly("dim", [](const GroupView& view) { return view.group().dim; })
      .def_property_readonly("rows", &GroupView::Rows)
      .def_property_readonly("inverse", &GroupView::Inverse)
      .def_property_readonly("lookups",
                             [](const GroupView& view) {
                               std::vector<size_t> numbers;
                               for (const auto& lookup : view.group().lookups)
                                 numbers.push_back(lookup.lookup);
                               return numbers;
                             })
      .def_property_readonly("tables", &TablesOfGroup)
      .def_property_readonly("sizes", [](const GroupView& view) {
        std::vector<size_t> sizes;
        for (const auto& lookup : view.group().lookups) sizes.push_back(lookup.size);
        return sizes;
      });

  module.def("empty", &Empty, py::arg("rows"), py::arg("columns"), py::arg("is_float64"));
  py::class_<PulledBatch, std::shared_ptr<PulledBatch>>(module, "Pulled", "What Client.pull returns.")
      .def_property_readonly("groups", [](const std::shared_ptr<PulledBatch>& batch) {
        std::vector<GroupView> groups;
        for (size_t g = 0; g < batch->plan.groups.size(); ++g) groups.push_back({batch, g});
        return groups;
      });
}

}  // namespace

void BindClient(py::module_& module) {
  BindPulled(module);
  BindIncrements(module);
  py::class_<Client>(module, "Client", "See oe_runtime.Client.")
      .def_static("in_process", &InProcess, py::arg("storage"), py::arg("servers"), py::arg("threads"))
      .def_static("connect", &Connect, py::arg("endpoints"), py::arg("token"), py::arg("timeout"),
                  py::arg("threads"), py::arg("wire_checkpoints"), py::arg("tls"), py::arg("job"),
                  py::arg("worker"), py::arg("read_only"), py::arg("share_memory"), py::arg("of") = 0)
      .def_property_readonly("servers", &Client::servers)
      .def("create_table",
           [](Client& client, const std::string& spec) {
             const TableSpec parsed = TableSpecFromJsonText(spec);
             return Released([&] { return client.CreateTable(parsed); });
           })
      .def("drop",
           [](Client& client, const std::vector<std::string>& tables, const std::optional<std::string>& job,
              bool force) { return Released([&] { return client.Drop(tables, job, force); }); })
      .def("skip_tables", &Client::SkipTables, py::arg("next"))
      .def("spec", [](const Client& client, uint32_t table) { return ToJsonText(client.Spec(table)); })
      .def("pull", &Pull, py::arg("ids"), py::arg("lookups"))
      .def("plan", &Plan, py::arg("ids"), py::arg("lookups"))
      .def("refresh", &Client::Refresh, Release(), py::arg("pulled"), py::arg("staleness"))
      .def("read_ahead", &Client::ReadAhead, Release(), py::arg("pulls"))
      .def_property_readonly("reads_ahead", &Client::reads_ahead)
      .def("follow", &Client::Follow, Release(), py::arg("pulled"), py::arg("before"))
      .def("pairs", &PairsOf, py::arg("group"))
      .def("embeddings", &Embeddings, py::arg("group"), py::arg("out"))
      .def("pool", &PoolBagsOf, py::arg("group"), py::arg("bags"), py::arg("out"))
      .def("sum_bags", &SumBagsOf, py::arg("group"), py::arg("bags"), py::arg("gradients"))
      .def("push", &Push, py::arg("pulled"), py::arg("of_ids"), py::arg("of_rows"), py::arg("learning_rates"))
      .def("pull_rows", &PullRows, py::arg("table"), py::arg("keys"))
      .def("assign", &Assign, py::arg("table"), py::arg("keys"), py::arg("rows"), py::arg("slots"))
      .def("check_rows", &CheckRows, py::arg("table"), py::arg("keys"), py::arg("rows"), py::arg("slots"))
      .def("erase", &Erase, py::arg("table"), py::arg("keys"))
      .def("read_rows", &ReadRows, py::arg("table"), py::arg("keys"), py::arg("rows"), py::arg("slots"))
      .def("new_array", &NewArray, py::arg("rows"), py::arg("columns"), py::arg("is_float64"))
      .def("slots", &SlotsOfTable, py::arg("table"))
      .def("keys", &KeysOf, py::arg("table"), py::arg("part") = py::none())
      .def("most_rows", &Client::MostRows)
      .def("save",
           [](Client& client, const std::string& directory, const std::string& since, bool hold) {
             Contents contents;
             std::string saved =
                 Released([&] { return client.Save(directory, since, hold ? &contents : nullptr).dump(); });
             py::dict files;
             for (const auto& [name, content] : contents) files[py::str(name)] = py::bytes(content);
             return py::make_tuple(saved, files);
           })
      .def_property_readonly("torn", [](Client& client) { return Released([&] { return client.torn(); }); })
      .def("tear", [](Client& client, const std::string& reason) { Released([&] { client.Tear(reason); }); })
      .def("restore",
           [](Client& client, const std::vector<std::string>& directories) {
             Released([&] { client.Restore(directories); });
           })
      .def("apply_increment",
           [](Client& client, Increments& increment) {
             Released([&] { client.ApplyIncrement(&increment.of_servers); });
           })
      .def("checkpoint",
           [](Client& client, uint64_t id, bool wait) { Released([&] { client.Checkpoint(id, wait); }); })
      .def("checkpoints", [](Client& client) { return Released([&] { return client.Checkpoints(); }); })
      .def("recover", [](Client& client,
                         std::optional<uint64_t> id) { return Released([&] { return client.Recover(id); }); })
      .def("evict", [](Client& client) { return Released([&] { return client.Evict(); }); })
      .def("stats", [](Client& client) { return Released([&] { return client.Stats().dump(); }); })
      .def("exchange_shared", &ExchangeShared, py::arg("name"), py::arg("replaces"), py::arg("value"))
      .def("leave", [](Client& client) { Released([&] { client.Leave(); }); })
      .def("shutdown", [](Client& client) { Released([&] { client.Shutdown(); }); })
      .def("close", [](Client& client) { Released([&] { client.Close(); }); });
}

}  // namespace oe
