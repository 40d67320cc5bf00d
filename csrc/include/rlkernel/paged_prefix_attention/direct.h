// Attention of a step of decoding, one row of each sequence behind a dense cache: the plan is made here, of so few numbers that it
// takes less than to look one up.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "rlkernel/direct.h"
#include "rlkernel/paged_prefix_attention/bind.h"

namespace rlkernel::direct {

// The keys that a row sees, [first, last], and the key of its sequence's position 0, which a cache may have dropped.
struct SeenKeys {
  int64_t first, last, origin;
};

// What a mask [B or 1, 1, 1, Tk] shows each row; empty: not keys that follow each other, or it weighs them.
inline std::vector<SeenKeys> shown(const Maybe& mask, int64_t batch, int64_t keys) {
  std::vector<SeenKeys> found(batch, {0, keys - 1, 0});
  if (!mask.given) return found;
  if (mask.rank() != 4 || mask.size(1) != 1 || mask.size(2) != 1 || mask.size(3) != keys) return {};
  if (mask.size(0) != 1 && mask.size(0) != batch) return {};
  const bool flags = mask.holds(bind::type_of<bool>());
  if (!flags && !mask.is_float()) return {};
  const float hidden = flags                         ? 0
                       : mask.dtype() == Dtype::f32  ? -FLT_MAX / 2
                       : mask.dtype() == Dtype::bf16 ? -0x1.fep127f / 2
                                                     : -65504.0f / 2;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t row = mask.size(0) == 1 ? 0 : b * mask.stride(0);
    int64_t first = -1, last = -1, count = 0;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = row + j * mask.stride(3);
      bool sees;
      if (flags) sees = static_cast<const uint8_t*>(mask.data())[at] != 0;
      else {
        const float value = wide_of(mask, at);
        sees = value == 0;
        if (!sees && !(value <= hidden)) return {};
      }
      if (!sees) continue;
      if (first < 0) first = j;
      last = j, ++count;
    }
    if (count == 0 || count != last - first + 1) return {};
    found[b] = {first, last, first};
  }
  return found;
}

// One row of each sequence, below autograd.
struct Step {
  const Plain &query, &key, &value;  // [B, Hq, 1, D], [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv]
  double scale, softcap;
  int64_t window;
  const Maybe& sinks;

  bool fits() const {
    if (query.rank() != 4 || key.rank() != 4 || value.rank() != 4 || !query.is_float()) return false;
    if (!key.has_type_of(query) || !value.has_type_of(query) || query.size(2) != 1) return false;
    if (query.elements() == 0 || key.elements() == 0 || value.elements() == 0 || query.size(3) != key.size(3)) return false;
    for (int d = 0; d < 3; ++d)
      if (key.size(d) != value.size(d)) return false;
    if (key.size(0) != batch() || heads() % key.size(1) != 0 || (query.size(3) > 1 && query.stride(3) != 1)) return false;
    // the keys of all sequences are pages of one cache
    return key.stride(2) > 0 && value.stride(2) > 0 &&
           (batch() == 1 || (key.stride(0) % key.stride(2) == 0 && value.stride(0) % value.stride(2) == 0 &&
                             pages_apart() == value.stride(0) / value.stride(2))) &&
           (batch() - 1) * pages_apart() + keys() < (int64_t{1} << 31) && (!sinks.given || is_row(sinks, heads()));
  }

  int64_t batch() const { return query.size(0); }
  int64_t heads() const { return query.size(1); }
  int64_t keys() const { return key.size(2); }
  int64_t pages_apart() const { return batch() == 1 ? 0 : key.stride(0) / key.stride(2); }

  // Into out [B, Hq, Dv] and lse [Hq, B]; false where there are more partial results than a plan has at once.
  template <class Launch>
  bool run(const std::vector<SeenKeys>& seen, void* out, float* lse, Launch launch) const {
    constexpr int64_t kMost = 1 << 13;
    std::vector<int32_t> rows, positions, pages, items, starts{0}, slots;
    for (int64_t b = 0; b < batch(); ++b) {
      const SeenKeys& s = seen[b];
      const int64_t end = s.last - s.origin + 1, begin = s.first - s.origin, before = pages.size();
      rows.push_back(b), positions.push_back(end - 1);
      for (int64_t j = s.first; j <= s.last; ++j) pages.push_back(b * pages_apart() + j);
      for (int64_t at = begin; at < end;) {
        const int64_t stop = std::min(end, (at / kPagedChunk + 1) * kPagedChunk);
        for (const int64_t x : {b, b + 1, static_cast<int64_t>(before) + at - begin, at, stop - at, static_cast<int64_t>(slots.size()), int64_t{0}})
          items.push_back(x);
        slots.push_back(slots.size());
        at = stop;
      }
      starts.push_back(slots.size());
    }
    const int64_t count = slots.size(), dim = query.size(3), value_dim = value.size(3);
    if (count > kMost) return false;
    const int32_t launches[] = {0, static_cast<int32_t>(count), 0, static_cast<int32_t>(batch())};
    const std::unique_ptr<float[]> states(new float[count * heads() * (value_dim + kPagedState)]);
    const auto wide = widened(sinks);
    const PagedAttention a{query.dtype(), query.data(), query.stride(0), query.stride(1), key.data(), value.data(),
                           {key.stride(2), 0, key.stride(1), key.stride(3)}, {value.stride(2), 0, value.stride(1), value.stride(3)},
                           1, heads(), key.size(1), dim, value_dim, rows.data(), positions.data(), pages.data(), items.data(),
                           starts.data(), slots.data(), launches, batch(), 1, states.get(),
                           !sinks.given ? nullptr : wide ? wide.get() : static_cast<const float*>(sinks.data()), out, lse, scale,
                           softcap, window};
    launched(key.elements(), [&] { return launch(a, nullptr); });
    return true;
  }
};

// Of a model's layer inside batch_invariant: [B, 1, Hq, Dv]. The positions [B or 1, 1] of the rows say where sequences begin, where
// the masks agree; else each begins with the first key that its row sees.
struct step_attention {
  static constexpr int kPlaces = 5;
  static constexpr bool kTrains = false;
  Plain query, key, value;
  Maybe mask, positions;
  double scale = 0, softcap = 0;
  int64_t window = 0;
  Maybe sinks;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    const Step step{query, key, value, scale, softcap, window, sinks};
    if (!step.fits() || window < 0) return {};
    auto seen = shown(mask, step.batch(), step.keys());
    if (seen.empty() || !(are_explained(seen, true) || are_explained(seen, false))) return {};
    Plain out;
    const int64_t shape[] = {step.batch(), 1, step.heads(), value.size(3)};
    py::object made = caller.new_empty(query.object, shape, 4, false, out);
    const std::unique_ptr<float[]> lse(new float[step.batch() * step.heads()]);
    return step.run(seen, out.data(), lse.get(), launch) ? made : py::object();
  }

 private:
  // Whether rows see the keys from their origin on that are in their window.
  bool are_explained(std::vector<SeenKeys>& seen, bool by_positions) const {
    const int64_t count = seen.size();
    if (by_positions) {
      if (!positions.given || !positions.holds(bind::type_of<int64_t>()) || positions.rank() != 2 || positions.size(1) != 1) return false;
      if (positions.size(0) != 1 && positions.size(0) != count) return false;
    }
    for (int64_t b = 0; b < count; ++b) {
      SeenKeys& s = seen[b];
      const int64_t at = positions.given && positions.size(0) > 1 ? b * positions.stride(0) : 0;
      s.origin = by_positions ? s.last - static_cast<const int64_t*>(positions.data())[at] : s.first;
      const int64_t from = window ? std::max(s.origin, s.last - window + 1) : s.origin;
      if (s.first != from || s.last - s.origin >= (int64_t{1} << 31)) return false;
    }
    return true;
  }
};

RLKERNEL_FIELDS(step_attention, query, key, value, mask, positions, scale, softcap, window, sinks)

// torch's operation in its dispatcher: [B, Hq, 1, Dv] and [B, Hq, 1]. A row counts from the first key that it sees.
struct step_of_sdpa {
  static constexpr int kPlaces = 5;
  Plain query, key, value;
  double dropout_p = 0;
  bool is_causal = false;
  Maybe attn_mask;
  double scale = NAN;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    const Maybe no_sinks{};
    const double factor = std::isnan(scale) ? std::pow(static_cast<double>(query.last()), -0.5) : scale;
    const Step step{query, key, value, factor, 0, 0, no_sinks};
    // of one row is_causal shows the first key alone
    if (dropout_p != 0 || is_causal || !step.fits()) return {};
    const auto seen = shown(attn_mask, step.batch(), step.keys());
    if (seen.empty() || !are_noted(caller, seen)) return {};
    Plain out, lse;
    const int64_t shape[] = {step.batch(), step.heads(), 1, value.size(3)};
    const py::object made = caller.new_empty(query.object, shape, 4, false, out), lses = caller.new_empty(query.object, shape, 3, true, lse);
    const std::unique_ptr<float[]> by_head(new float[step.batch() * step.heads()]);
    if (!step.run(seen, out.data(), by_head.get(), launch)) return {};
    auto* to = static_cast<float*>(lse.data());
    for (int64_t b = 0; b < step.batch(); ++b)
      for (int64_t h = 0; h < step.heads(); ++h) *to++ = by_head[h * step.batch() + b];
    return py::make_tuple(made, lses);
  }

 private:
  // Each block keeps how many keys single rows saw: it must not have windows of as many, and Python says why.
  bool are_noted(const Caller& caller, const std::vector<SeenKeys>& seen) const {
    static PyObject *const windows = name("windows"), *const steps = name("steps");
    return caller.each_level([&](PyObject* level) { return PySet_Size(places_of(caller, level, windows).ptr()) == 0; }) &&
           caller.each_level([&](PyObject* level) {
             const py::object kept = places_of(caller, level, steps);
             for (const SeenKeys& s : seen)
               if (PySet_Add(kept.ptr(), py::int_(s.last - s.first + 1).ptr()) != 0) throw py::error_already_set();
             return true;
           });
  }

  // A field of rlkernel.runtime.invariance.Places, of calls that are as strict as the innermost block.
  static py::object places_of(const Caller& caller, PyObject* level, PyObject* field) {
    static PyObject *const places = name("places"), *const strict = name("strict");
    PyObject* innermost = nullptr;
    caller.each_level([&](PyObject* each) { return innermost = each, true; });
    const py::object found = py::reinterpret_borrow<py::object>(level).attr(places)[py::handle(innermost).attr(strict)];
    return found.attr(field);
  }
};

RLKERNEL_FIELDS(step_of_sdpa, query, key, value, dropout_p, is_causal, attn_mask, scale)

}  // namespace rlkernel::direct
