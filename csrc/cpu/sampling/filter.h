// The tokens that the filters of a row keep. The row is read again, but only the groups whose maximum says that they matter.
#pragma once

#include "row.h"
#include "select.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr double kMassOne = 0x1p40;  // of the likeliest token
constexpr int64_t kManyGroups = 256;  // more than these are not all made candidates
constexpr int64_t kFewGroups = 96;    // a peaked row's nucleus lies in as many
constexpr int64_t kSampled = 256;     // groups of a row
constexpr int kSampleWidth = 16;      // tokens of such a group

class Filter {
 public:
  Filter(const SamplingInputs& in, int64_t row, const Reader& reader, const Softmax& softmax, float temperature,
         Candidates& candidates)
      : exp_(temperature), temperature_(temperature), sum_(softmax.sum), max_(softmax.max), vocab_(in.whole_vocab),
        groups_((in.whole_vocab + kGroup - 1) / kGroup), group_max_(in.group_max + row * groups_), read_(reader),
        c_(candidates) {
    c_.reserve(vocab_);
  }

  // Finds the kept tokens; `cutoff` is that of min_p and top_n_sigma on d = z - max, -inf without them.
  void run(int64_t k, float p, float cutoff, FilterOrder order) {
    if (order == FilterOrder::top_k_first && p < 1) {
      keep(k, p, -kInf, false);
      if (kept.pivot - max_ < cutoff) kept = totals({kLowest, cutoff});
      cutoff_ = cutoff;
    } else {
      keep(k, p, cutoff, order == FilterOrder::joint);
    }
  }

  bool keeps(float z, int64_t token) const {
    return z - max_ >= cutoff_ && z <= high_ && (z > kept.pivot || (z == kept.pivot && token <= kept.last));
  }

  // typical_p and XTC, of what the others keep: from here on the kept tokens have an upper end too.
  void narrow(const float* band) {
    if (band[kTypical] < 1) {
      const float mean = mean_of_kept(), radius = radius_about(mean, band[kTypical]);
      float low = kInf, high = -kInf;
      each_kept_token([&](float z, float, int64_t) {
        if (!(std::fabs(z - max_ - mean) <= radius)) return;
        low = std::fmin(low, z);
        high = std::fmax(high, z);
      });
      if (low > kept.pivot) {
        kept.pivot = low;
        kept.last = std::numeric_limits<int64_t>::max();
      }
      high_ = high;
      weigh_kept();
    }
    if (band[kExclude] < 1) {
      const float from = exclusion_of(band[kExclude], kept.mass, temperature_);
      float least = kInf;
      each_kept_token([&](float z, float, int64_t) { least = z - max_ >= from ? std::fmin(least, z) : least; });
      high_ = std::fmin(high_, least);
      weigh_kept();
    }
  }

  // Calls body(z, first token, mask of the kept) for the vectors that hold kept tokens, ascending, until it returns false.
  template <class Body>
  void each_kept(Body body) const {
    const Floats pivot = broadcast(kept.pivot);
    alignas(64) float buffer[kGroup];
    for (int64_t g = 0; g < groups_; ++g) {
      if (group_max_[g] < kept.pivot || group_max_[g] - max_ < cutoff_) continue;
      const float* group = read_(g, buffer);
      for (int i = 0; i < kVectors; ++i) {
        const int64_t token = g * kGroup + i * kWidth;
        const Floats z = load(group + i * kWidth);
        const unsigned inside = bits_of(at_least(z - broadcast(max_), broadcast(cutoff_)));
        unsigned ties = bits_of(equal(z, pivot));
        if (ties != 0 && kept.last < token + kWidth - 1)
          ties &= kept.last < token ? 0u : (2u << (kept.last - token)) - 1u;
        const unsigned mask = inside & bits_of(at_least(broadcast(high_), z)) & (bits_of(above(z, pivot)) | ties);
        if (mask != 0 && !body(z, token, mask)) return;
      }
    }
  }

  Prefix kept;

 private:
  struct Scope {
    float lowest, cutoff;  // of z, and of z - max
  };
  struct Range {
    double least, most;
  };

  void keep(int64_t k, float p, float cutoff, bool joint) {
    const bool k_on = k >= 1 && k < vocab_, p_on = p < 1;
    cutoff_ = cutoff;
    Scope scope{kLowest, cutoff};
    // k groups have a token as large as their k-th largest maximum
    if (k_on && k <= groups_) scope.lowest = std::fmax(kLowest, largest_group(k));
    if (!p_on) {
      kept = k_on ? first(k, gather(scope)) : totals(scope);
      return;
    }
    scope.cutoff = std::fmax(cutoff, massless());
    if (k_on && !joint) {
      kept = first(k, gather(scope));
      kept = select<true>(c_, {}, share(p, kept.mass));
    } else if (!k_on && cutoff == -kInf && passing(near(scope, p, estimate().least)) > kManyGroups) {
      if (!peaked(p)) kept = bracketed(p);
    } else {
      kept = nucleus(k_on ? k : vocab_, p, scope, joint || cutoff == -kInf ? estimate() : exactly(totals(scope).mass));
    }
  }

  // Below this a token has no mass; finite, so that -inf is below it at any T.
  float massless() const { return std::fmax(-29.0f * temperature_, -3e38f); }

  static int64_t share(float p, double mass) {
    return static_cast<int64_t>(std::ceil(static_cast<double>(p) * mass));
  }

  static Range exactly(int64_t mass) { return {static_cast<double>(mass), static_cast<double>(mass)}; }

  // The mass of all tokens as pass A's sum tells it: enough, unless a token stands just at top_p.
  Range estimate() const {
    const double slack = 4e-5, sum = sum_ * kMassOne, rounding = static_cast<double>(vocab_);
    return {sum * (1 - slack) - rounding, sum * (1 + slack) + rounding};
  }

  Floats e_of(Floats d) const { return exp_(exp_.cut(d)); }

  // Calls body(z, e, token) for the kept tokens, ids ascending.
  template <class Body>
  void each_kept_token(Body body) const {
    each_kept([&](Floats z, int64_t first, unsigned mask) {
      const Floats e = e_of(z - broadcast(max_));
      for (; mask != 0; mask &= mask - 1) {
        const int lane = __builtin_ctz(mask);
        body(z[lane], e[lane], first + lane);
      }
      return true;
    });
  }

  void weigh_kept() {
    kept.count = kept.mass = 0;
    each_kept_token([&](float, float e, int64_t) {
      kept.count += 1;
      kept.mass += stream_mass(e);
    });
  }

  // The mean of z - max z over the kept tokens, of integers: in any order the same.
  float mean_of_kept() const {
    int64_t sum = 0;
    each_kept_token([&](float z, float e, int64_t) { sum += e > 0 ? stream_mass(e * ((max_ - z) / temperature_)) : 0; });
    return static_cast<float>(-static_cast<double>(temperature_) * (static_cast<double>(sum) / static_cast<double>(kept.mass)));
  }

  // How far from `mean` the kept tokens reach that have a share of their mass, the nearest ones first.
  float radius_about(float mean, float part) {
    int64_t n = 0;
    each_kept_token([&](float z, float e, int64_t token) {
      c_.z[n] = -std::fabs(z - max_ - mean);
      c_.ids[n] = static_cast<int32_t>(token);
      c_.masses[n++] = stream_mass(e);
    });
    c_.n = n;
    return -select<true>(c_, {}, share(part, static_cast<double>(kept.mass))).pivot;
  }

  // Without tokens that cannot be in the nucleus: those below the new cutoff have less than (1 - p) of the mass together.
  Scope near(Scope scope, float p, double mass) const {
    const double tokens = static_cast<double>(vocab_);  // as many times, the rounding to an integer mass errs
    const double each = ((1 - static_cast<double>(p)) * mass - tokens) / kMassOne / tokens;
    const float floor = each > 0 ? static_cast<float>(temperature_ * (std::log(each) - 0.01)) : massless();
    return {scope.lowest, std::fmax(scope.cutoff, floor)};
  }

  // Notes the groups that hold a token of the scope.
  int64_t passing(Scope scope) {
    int32_t* const ids = c_.groups.data();
    int64_t n = 0, g = 0;
    const Floats lowest = broadcast(scope.lowest), cutoff = broadcast(scope.cutoff), max = broadcast(max_);
    for (; g + kWidth <= groups_; g += kWidth) {
      const Floats top = load(group_max_ + g);
      append_ids(ids, n, bits_of(at_least(top, lowest) & at_least(top - max, cutoff)), g);
    }
    for (; g < groups_; ++g) {
      ids[n] = static_cast<int32_t>(g);
      n += group_max_[g] >= scope.lowest && group_max_[g] - max_ >= scope.cutoff;
    }
    return n;
  }

  // Calls body(z, d, first token, lanes of the scope) for the vectors of the groups that pass, and flush() before MassSum needs it.
  template <class Body, class Flush>
  void each_vector_of(Scope scope, Body body, Flush flush) {
    const int64_t n = passing(scope);
    const Floats lowest = broadcast(scope.lowest), cutoff = broadcast(scope.cutoff), max = broadcast(max_);
    alignas(64) float buffer[kGroup];
    for (int64_t j = 0; j < n; ++j) {
      if (j + 8 < n) read_.prefetch_group(c_.groups[j + 8]);
      const int64_t g = c_.groups[j];
      const float* group = read_(g, buffer);
      for (int i = 0; i < kVectors; ++i) {
        const Floats z = load(group + i * kWidth), d = z - max;
        body(z, d, g * kGroup + i * kWidth, at_least(z, lowest) & at_least(d, cutoff));
      }
      if ((j + 1) % (MassSum::kMost / kVectors) == 0) flush();
    }
    flush();
  }

  Prefix totals(Scope scope) {
    MassSum sum;
    each_vector_of(
        scope, [&](Floats, Floats d, int64_t, Mask lanes) { sum.add(e_of(d), lanes); }, [&] { sum.flush(); });
    Prefix all;
    all.pivot = scope.lowest;
    all.count = sum.count();
    all.mass = sum.value();
    return all;
  }

  // The tokens of the scope become the candidates.
  Prefix gather(Scope scope) {
    float* const values = c_.z.data();
    int32_t* const ids = c_.ids.data();
    int64_t n = 0;
    each_vector_of(scope, [&](Floats z, Floats, int64_t token, Mask lanes) {
      append(values, ids, n, z, bits_of(lanes), token);
    }, [] {});
    c_.n = n;
    Prefix all;
    all.pivot = scope.lowest;
    all.count = c_.n;
    all.mass = weigh();
    return all;
  }

  // The candidates' masses and their sum.
  int64_t weigh() {
    int64_t sum = 0;
    for (int64_t i = 0; i < c_.n; i += kWidth)
      Masses(e_of(load(c_.z.data() + i) - broadcast(max_))).store_to(c_.masses.data() + i);
    for (int64_t i = 0; i < c_.n; ++i) sum += c_.masses[i];
    return sum;
  }

  float largest_group(int64_t k) {
    for (int64_t g = 0; g < groups_; ++g) {
      c_.z[g] = group_max_[g];
      c_.ids[g] = static_cast<int32_t>(g);
      c_.masses[g] = 0;
    }
    c_.n = groups_;
    return select<false>(c_, {}, k).pivot;
  }

  Prefix first(int64_t k, Prefix all) { return all.count > k ? select<false>(c_, {}, k) : all; }

  // top_p's share of a mass that all tokens have (or those above the cutoff), and at most k tokens.
  Prefix nucleus(int64_t k, float p, Scope scope, Range mass) {
    Prefix all = gather(near(scope, p, mass.least));
    Prefix result = first(k, all);
    int64_t low = share(p, mass.least), high = share(p, mass.most);
    if (all.mass < low) return result;
    Prefix cut = select<true>(c_, {}, low);
    if (cut.mass < high) {  // the sum of pass A is not exact enough
      const int64_t target = share(p, static_cast<double>(totals({kLowest, massless()}).mass));
      if (all.mass < target) return result;
      cut = select<true>(c_, {}, target);
    }
    return cut.count <= result.count ? cut : result;  // at equal counts too: `all` is only what is near
  }

  // Whether the tokens of a few groups make up the nucleus, which it then is.
  bool peaked(float p) {
    const Range mass = estimate();
    const int64_t low = share(p, mass.least), high = share(p, mass.most);
    const Prefix all = gather({largest_group(kFewGroups), massless()});
    if (all.mass < high) return false;
    kept = select<true>(c_, {}, low);
    return kept.mass >= high;
  }

  // top_p's share of all tokens, where many matter: a sample says about where the nucleus ends, and one reading sums what lies
  // above and takes only the tokens about there as candidates.
  Prefix bracketed(float p) {
    const Scope scope{kLowest, massless()};
    float low, high;
    guess(p, scope, low, high);
    for (;;) {
      MassSum total, top;
      float* const values = c_.z.data();
      int32_t* const ids = c_.ids.data();
      int64_t n = 0;
      const Floats from = broadcast(std::fmax(low, scope.cutoff)), to = broadcast(high);
      each_vector_of(scope, [&](Floats z, Floats d, int64_t token, Mask) {
        const Mask over = at_least(d, to);
        top.add(e_of(d), over, total);  // 0 of what is not in the scope
        append(values, ids, n, z, bits_of(without(at_least(d, from), over)), token);
      }, [&] {
        total.flush();
        top.flush();
      });
      c_.n = n;
      Prefix above;
      above.count = top.count();
      above.mass = top.value();
      const int64_t target = share(p, static_cast<double>(total.value()));
      const int64_t candidates = weigh();
      if (above.mass >= target) {
        low = high;
        high = kInf;
      } else if (above.mass + candidates < target) {
        high = low;
        low = -kInf;
      } else {
        return select<true>(c_, above, target);
      }
    }
  }

  // Bounds on d about the end of the nucleus: a histogram of sampled tokens by d, from below, because the mass below is the sum
  // of many small ones.
  void guess(float p, Scope scope, float& low, float& high) {
    constexpr int kBins = 1024;
    double sums[kBins] = {}, squares[kBins] = {};
    const int64_t n = passing(scope), step = std::max<int64_t>(1, n / kSampled);
    alignas(64) float buffer[kGroup], e[kSampleWidth];
    alignas(64) int32_t bins[kSampleWidth];
    int64_t sampled = 0;
    const float unit = -massless() / kBins;
    for (int64_t j = 0; j < n; j += step, sampled += kSampleWidth) {
      if (j + 4 * step < n) read_.prefetch_group(c_.groups[j + 4 * step]);
      const float* group = read_(c_.groups[j], buffer) + j / step % (kGroup / kSampleWidth) * kSampleWidth;
      for (int i = 0; i < kSampleWidth; i += kWidth) {
        const Floats d = load(group + i) - broadcast(max_), cut = max(d, broadcast(scope.cutoff));
        store(e + i, where(at_least(d, cut), e_of(d)));
        const Ints bin = __builtin_convertvector((cut - broadcast(scope.cutoff)) * broadcast(1 / unit), Ints);
        std::memcpy(bins + i, &bin, sizeof bin);
      }
      for (int i = 0; i < kSampleWidth; ++i) {
        const int bin = std::min(kBins - 1, bins[i]);
        sums[bin] += e[i];
        squares[bin] += static_cast<double>(e[i]) * e[i];
      }
    }
    const double tail = (1 - static_cast<double>(p)) * sum_ / (static_cast<double>(n) * kGroup / sampled);
    low = -kInf;
    high = kInf;
    double sum = 0, square = 0;
    for (int bin = 0; bin < kBins; ++bin) {
      sum += sums[bin];
      square += squares[bin];
      const double error = 4 * std::sqrt(square);
      if (sum + error <= tail) low = scope.cutoff + unit * static_cast<float>(bin + 1);
      if (sum - error >= tail) {
        high = scope.cutoff + unit * static_cast<float>(bin + 2);
        return;
      }
    }
  }

  FactorExp exp_;
  float temperature_;
  double sum_;
  float max_;
  int64_t vocab_, groups_;
  const float* group_max_;
  const Reader& read_;
  Candidates& c_;
  float cutoff_ = -kInf, high_ = kInf;
  static constexpr float kLowest = -std::numeric_limits<float>::max();
};

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
