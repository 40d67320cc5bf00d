// The public call of plain tensors: the whole vocabulary, without supports.
#pragma once
#include "rlkernel/direct.h"
#include "rlkernel/logprob/bind.h"

namespace rlkernel::direct {

struct logprob {
  static constexpr int kPlaces = 2;
  static constexpr bool kTrains = false;
  Plain logits, target_ids;
  double temperature = 1;
  int64_t ignore_index = -100;
  bool return_entropy = false, inplace_backward = false;
  Absent support_ids, support_offsets, group, vocab_start;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    const auto t = static_cast<float>(temperature);
    if (!are_rows(logits) || !are_targets() || inplace_backward || !(t >= FLT_MIN && t <= FLT_MAX)) return {};
    if (caller.is_debugging() || caller.is_of_ranks()) return {};
    Plain logprobs, lse, entropy;
    const py::object log = caller.empty(target_ids.object, logprobs, true);
    const py::object sum = caller.empty(log.ptr(), lse);
    const py::object of_all = return_entropy ? caller.empty(log.ptr(), entropy) : py::none();
    const int64_t rows = target_ids.elements();
    float small[2 * kSmall];
    const std::unique_ptr<float[]> large(rows > kSmall ? new float[2 * rows] : nullptr);
    float* for_backward = large ? large.get() : small;
    calls::TileFields tile{logits, 0, target_ids, ignore_index, {}, {}, 1, 0};
    tile.temperature.all = t;
    launched(logits.elements(), [&] {
      return calls::each_rows(logits, [&](const calls::Rows& part) {
        const auto floats = [&](const bind::Tensor& x) { return tile.of_rows<float>(x, part); };
        return launch({tile.tile(part), nullptr, nullptr, nullptr, nullptr, true, true, floats(logprobs), floats(entropy),
                       floats(lse), for_backward, for_backward + rows},
                      nullptr);
      });
    });
    static PyObject* const output = type_named("rlkernel.calls.logprob", "LogprobOutput");
    return made(output, log, of_all, sum);
  }

 private:
  static constexpr int64_t kSmall = 64;

  // [...] int64, each of the vocabulary or ignored.
  bool are_targets() const {
    if (!target_ids.given || target_ids.rank() != logits.rank() - 1 || !target_ids.holds(bind::type_of<int64_t>())) return false;
    for (int d = 0; d < target_ids.rank(); ++d)
      if (target_ids.size(d) != logits.size(d)) return false;
    if (!target_ids.is_dense()) return false;
    const auto* id = static_cast<const int64_t*>(target_ids.data());
    const int64_t rows = target_ids.elements(), vocab = logits.last();
    for (int64_t r = 0; r < rows; ++r)
      if (id[r] != ignore_index && (id[r] < 0 || id[r] >= vocab)) return false;
    return true;
  }
};

RLKERNEL_FIELDS(logprob, logits, target_ids, temperature, ignore_index, return_entropy, inplace_backward, support_ids,
                support_offsets, group, vocab_start)

// torch's softmax in its dispatcher, over the last dimension.
template <bool kLogarithm>
struct SoftmaxOfRows {
  static constexpr int kPlaces = 3;
  // of more dimensions they may be an attention's scores, which Python looks at
  static constexpr int kMostRank = kLogarithm ? 3 : 2;
  Plain x;
  int64_t dim = 0;
  bool wide = false;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    if (!are_rows(x) || x.rank() > kMostRank || (dim != -1 && dim != x.rank() - 1)) return {};
    Plain out;
    py::object made = caller.empty(x.object, out, wide);
    const calls::softmax call{x, kLogarithm, out};
    launched(x.elements(), [&] { return call.run(launch, nullptr); });
    return made;
  }
};

using softmax_of_rows = SoftmaxOfRows<false>;
using log_softmax_of_rows = SoftmaxOfRows<true>;

RLKERNEL_FIELDS(softmax_of_rows, x, dim, wide)
RLKERNEL_FIELDS(log_softmax_of_rows, x, dim, wide)

}  // namespace rlkernel::direct
