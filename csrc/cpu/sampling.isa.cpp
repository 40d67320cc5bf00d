// Sampling on the CPU. Pass A deals out (row, split) pairs, so that one row is work for many threads too; pass B deals out
// rows. Neither the threads nor the other rows have a say in a row's bits.
#include "sampling/filter.h"
#include "sampling/finish.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 15;  // tokens from which waking the other threads pays

// z of a split as fp32 where it is not the logits themselves; false where x holds NaN or +inf, which the bitmask may hide.
template <class T>
bool make_z(const SamplingInputs& in, int64_t row, const T* x, int64_t start, int count, float* z) {
  const float* adjusted = in.adjusted != nullptr ? in.adjusted + row * in.adjusted_stride + start : nullptr;
  const int32_t* words = in.bitmask != nullptr ? in.bitmask + row * in.bitmask_stride : nullptr;
  const int64_t first = in.vocab_start + start;
  Bits good = ~Bits{};
  const auto some = [&](Floats v, Floats a, int i, int n) {
    good &= (Bits)(v < broadcast(kInf));
    if (words != nullptr) {
      // a word of the mask holds a whole number of vectors, because `first` is a multiple of 32
      const uint32_t bits = static_cast<uint32_t>(words[(first + i) / 32]) >> ((first + i) % 32);
      const Bits set = broadcast_bits(bits) >> iota(0) & 1u;
      a = set != 0u ? a : broadcast(-kInf);
    }
    if (n == kWidth)
      store(z + i, a);
    else
      store_part(z + i, a, n);
  };
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats v = load(x + i);
    some(v, adjusted != nullptr ? load(adjusted + i) : v, i, kWidth);
  }
  if (const int rest = count - i) {
    const Floats v = load_part(x + i, rest);
    some(v, adjusted != nullptr ? load_part(adjusted + i, rest) : v, i, rest);
  }
  return !any(~good);
}

struct Job {
  int64_t row, start;  // of the tile
  int count;
  float temperature;
  bool greedy;
  int64_t first;  // token of the whole vocabulary
  double* record;
  float* group_max;  // of this split, or null
};

template <class Z>
void draw(const SamplingInputs& in, const Job& job, const Groups<Z>& z, const Peaks& peaks, const PerGroup& masses,
          const FactorExp& exp) {
  double* record = job.record;
  record[kKey] = -kInf;
  record[kToken] = -1;
  record[kTokenZ] = record[kTokenX] = kNan;
  int token = -1;
  if (in.token_ids != nullptr) {
    const int64_t forced = in.token_ids[job.row] - job.first;
    if (forced < 0 || forced >= job.count) return;
    token = static_cast<int>(forced);
    record[kKey] = kInf;
  } else if (peaks.largest == -kInf || !(record[kSumZ] < kInf)) {
    return;
  } else if (job.greedy) {
    token = static_cast<int>(static_cast<int64_t>(record[kArgmax]) - job.first);
    record[kKey] = 0;
  } else {
    const RowKey key{in.seeds[job.row], position_of(in, job.row)};
    const Draw won = in.gumbel
        ? draw_gumbel(z, peaks.largest, exp, job.temperature, key, job.first)
        : draw_grouped(z, peaks.groups, masses, exp, key, static_cast<uint32_t>(job.first / kSamplingGroup));
    if (won.token < 0) return;
    token = won.token;
    record[kKey] = won.key;
  }
  record[kToken] = static_cast<double>(job.first + token);
  record[kTokenZ] = widen_one(z[token / kGroup][token % kGroup]);
}

// What z alone says.
template <class Z>
Peaks look_at_z(const SamplingInputs& in, const Job& job, const Groups<Z>& z) {
  double* record = job.record;
  const FactorExp exp(job.temperature);
  const Peaks peaks = peaks_of(z);
  const int tail = z.count - z.whole;
  record[kMaxZ] = peaks.largest;
  record[kFinite] = peaks.least > -kInf && tail == 0 ? job.count : finite_count(z);
  if (job.group_max != nullptr)
    for (int g = 0; g < z.count; ++g) job.group_max[g] = peaks.groups.values()[g];
  const int group = peaks.groups.find(peaks.largest);
  record[kArgmax] = static_cast<double>(job.first + group * kGroup + find_in_group(z[group], peaks.largest));
  record[kWeighted] = record[kMean] = record[kM2] = 0;
  if (in.sigma) moments_of(z, static_cast<int>(record[kFinite]), record[kMean], record[kM2]);

  if (peaks.largest == -kInf) {
    record[kSumZ] = has_nan(z) ? kNan : 0;
    draw(in, job, z, peaks, peaks.groups, exp);
    return peaks;
  }
  double weighted = 0;
  const PerGroup masses = in.entropy ? masses_of<Z, true>(z, peaks, exp, kSamplingSplit, weighted)
                                     : masses_of<Z, false>(z, peaks, exp, kSamplingSplit, weighted);
  record[kSumZ] = sum_of(masses);
  record[kWeighted] = weighted / job.temperature;
  draw(in, job, z, peaks, masses, exp);
  return peaks;
}

// The softmax of the logits as given, where it is another one.
template <class T>
void look_at_x(const Job& job, const Groups<T>& x, const Peaks& peaks) {
  job.record[kMaxX] = peaks.largest;
  job.record[kSumX] = 0;
  if (peaks.largest == -kInf) return;
  double unused = 0;
  job.record[kSumX] = sum_of(masses_of<T, false>(x, peaks, FactorExp(1), kSamplingSplit, unused));
}

template <class T>
void split(const SamplingInputs& in, int64_t row, int64_t index) {
  Job job;
  job.row = row;
  job.start = index * kSamplingSplit;
  job.count = static_cast<int>(in.vocab - job.start < kSamplingSplit ? in.vocab - job.start : kSamplingSplit);
  const float t = of_row(in.temperature, row);
  job.greedy = t == 0;
  job.temperature = is_temperature(t) ? t : 1;
  job.first = in.vocab_start + job.start;
  const int64_t splits = (in.whole_vocab + kSamplingSplit - 1) / kSamplingSplit;
  const int64_t groups = (in.whole_vocab + kSamplingGroup - 1) / kSamplingGroup;
  job.record = in.records + (row * splits + job.first / kSamplingSplit) * kRecord;
  job.group_max = in.group_max != nullptr ? in.group_max + row * groups + job.first / kSamplingGroup : nullptr;

  const T* begin = static_cast<const T*>(in.logits) + row * in.row_stride + job.start;
  const Groups<T> x(begin, job.count);
  const bool mapped = in.adjusted != nullptr || in.bitmask != nullptr;
  if (mapped) {
    alignas(64) float z[kSamplingSplit];
    const bool good = make_z(in, row, begin, job.start, job.count, z);
    look_at_z(in, job, Groups<float>(z, job.count));
    if (!good) job.record[kSumZ] = kNan;
    if (in.raw) look_at_x(job, x, peaks_of(x));
  } else {
    const Peaks peaks = look_at_z(in, job, x);
    if (in.raw && job.temperature != 1) look_at_x(job, x, peaks);
  }
  if (!in.raw || (!mapped && job.temperature == 1)) {
    job.record[kMaxX] = job.record[kMaxZ];
    job.record[kSumX] = job.record[kSumZ];
  }
  if (const int64_t token = static_cast<int64_t>(job.record[kToken]) - job.first; token >= 0)
    job.record[kTokenX] = widen_one(begin[token]);
}

// A token drawn among the kept ones, because the winner of all is none of them.
int64_t draw_kept(const SamplingInputs& in, int64_t row, const Filter& filter, const Softmax& softmax, float temperature,
                  float& token_z) {
  const FactorExp exp(temperature);
  const int64_t seed = in.seeds[row], position = position_of(in, row);
  const Floats max = broadcast(softmax.max);
  int64_t token = -1;
  if (in.gumbel) {
    Gumbel winner(stream_prefix(seed, position), temperature);
    filter.each_kept([&](Floats z, int64_t first, unsigned mask) {
      const Floats d = exp.cut(z - max);
      const Bits lanes = broadcast_bits(mask) >> iota(0) & 1u;
      winner.look(d, lanes != 0u ? exp(d) : Floats{}, first);
      if (winner.token != token) token_z = z[(token = winner.token) - first];
      return true;
    });
    return token;
  }
  int64_t left = stream_below(stream_bits(kKeptDomain, seed, position), filter.kept.mass);
  filter.each_kept([&](Floats z, int64_t first, unsigned mask) {
    const Floats e = exp(exp.cut(z - max));
    for (; mask != 0; mask &= mask - 1) {
      const int lane = __builtin_ctz(mask);
      const int64_t mass = stream_mass(e[lane]);
      if (left < mass) {
        token = first + lane;
        token_z = z[lane];
        return false;
      }
      left -= mass;
    }
    return true;
  });
  return token;
}

// The number of tokens with a larger z, and of those with this one whose id is at most `last`.
int64_t rank_of(const Reader& read, const float* group_max, int64_t vocab, float z, int64_t last) {
  int64_t count = 0;
  alignas(64) float buffer[kGroup];
  const Floats value = broadcast(z);
  for (int64_t g = 0; g * kGroup < vocab; ++g) {
    if (group_max[g] < z) continue;
    const float* group = read(g, buffer);
    const bool ahead = (g + 1) * kGroup <= last + 1;
    for (int i = 0; i < kVectors; ++i) {
      const Floats v = load(group + i * kWidth);
      const int64_t upto = last + 1 - (g * kGroup + i * kWidth);  // how many ids of the vector are not behind the last
      unsigned ties = bits_of(equal(v, value));
      if (!ahead && ties != 0 && upto < kWidth) ties &= upto > 0 ? (1u << upto) - 1u : 0u;
      count += __builtin_popcount(bits_of(above(v, value)) | ties);
    }
  }
  return count;
}

void invalid_row(const SamplingInputs& in, const SamplingOutputs& out, int64_t row) {
  out.token_ids[row] = in.token_ids != nullptr ? in.token_ids[row] : -1;
  if (out.raw_logprobs != nullptr) out.raw_logprobs[row] = kNan;
  if (out.entropy != nullptr) out.entropy[row] = kNan;
  if (out.rank != nullptr) out.rank[row] = 0;
  out.tempered_logprobs[row] = out.processed_logprobs[row] = out.kept_mass[row] = kNan;
  if (out.row_max != nullptr) out.row_max[row] = kNan;
  if (out.log_sum != nullptr) out.log_sum[row] = kNan;
  out.kept_count[row] = 0;
  out.valid[row] = false;
}

// The kept ids of a filtered row, where they fit.
void write_support(const SamplingOutputs& out, int64_t row, const Filter& filter) {
  if (filter.kept.count > out.support_size) return;
  int32_t* support = out.support + row * out.support_size;
  filter.each_kept([&](Floats, int64_t first, unsigned mask) {
    for (; mask != 0; mask &= mask - 1) *support++ = static_cast<int32_t>(first + __builtin_ctz(mask));
    return true;
  });
}

// The cutoff of min_p, top_n_sigma and the thresholds on z - max.
float cutoff_of(const SamplingInputs& in, int64_t row, const Softmax& softmax, double temperature) {
  float cutoff = -kInf;
  if (const float min_p = of_row(in.min_p, row); min_p > 0)
    cutoff = static_cast<float>(temperature * std::log(static_cast<double>(min_p)));
  if (const float sigmas = of_row(in.top_n_sigma, row); sigmas < kInf) {
    const double sigma = std::sqrt(softmax.squares / softmax.finite);
    cutoff = std::fmax(cutoff, static_cast<float>(-static_cast<double>(sigmas) * sigma));
  }
  if (in.thresholds != nullptr) {
    const double log_sum = std::log(softmax.sum), entropy = log_sum - softmax.weighted / softmax.sum;
    const double least = least_of(in.thresholds + row * kThresholds, log_sum, entropy);
    cutoff = std::fmax(cutoff, static_cast<float>(temperature * least));
  }
  return cutoff;
}

void finish(const SamplingInputs& in, const SamplingOutputs& out, int64_t row) {
  const int64_t vocab = in.whole_vocab, splits = (vocab + kSamplingSplit - 1) / kSamplingSplit;
  const int64_t groups = (vocab + kGroup - 1) / kGroup;
  const float given = of_row(in.temperature, row), temperature = is_temperature(given) ? given : 1;
  const bool greedy = given == 0, single = greedy && !in.greedy_softmax;
  const Softmax softmax(in.records + row * splits * kRecord, splits, temperature);
  if (out.support != nullptr) std::fill_n(out.support + row * out.support_size, out.support_size, -1);
  if (!(softmax.sum > 0) || softmax.finite == 0 || !parameters_hold(in, row)) return invalid_row(in, out, row);

  const double log_sum = std::log(softmax.sum);
  const auto scaled = [&](float z) { return (static_cast<double>(z) - softmax.max) / temperature; };
  int64_t token = in.token_ids != nullptr ? in.token_ids[row] : softmax.token;
  float z = softmax.token_z, x = softmax.token_x;

  const int64_t k = of_row(in.top_k, row);
  const float p = of_row(in.top_p, row), cutoff = cutoff_of(in, row, softmax, temperature);
  const float* const band = band_of(in, row);
  const bool cut = (k >= 1 && k < vocab) || p < 1 || cutoff > -kInf || band != nullptr;
  bool filtered = !greedy && (cut || (in.bitmask != nullptr && softmax.finite < static_cast<double>(vocab)));
  bool kept = true;
  double log_kept = 0, kept_mass = 1;
  int64_t kept_count = static_cast<int64_t>(softmax.finite), last_tie = vocab - 1;
  const Reader read(in, row);
  if (filtered) {
    thread_local Candidates candidates;
    Filter filter(in, row, read, softmax, temperature, candidates);
    filter.run(k, p, cutoff, in.order);
    if (band != nullptr) filter.narrow(band);
    kept_count = filter.kept.count;
    filtered = kept_count < vocab;
    if (filtered) {
      kept = filter.keeps(z, token);
      if (!kept && in.token_ids == nullptr) {
        token = draw_kept(in, row, filter, softmax, temperature, z);
        x = read.x(token);
        kept = true;
      }
      if (kept && z == filter.kept.pivot) last_tie = std::min(last_tie, filter.kept.last);
      const double mass = static_cast<double>(filter.kept.mass) * 0x1p-40;
      log_kept = std::log(mass);
      kept_mass = mass / softmax.sum;
      if (out.support != nullptr) write_support(out, row, filter);
    }
  }
  if (greedy) {
    kept = !single || token == softmax.argmax;
    kept_mass = std::exp(-log_sum);
    kept_count = 1;
    if (single && kept) last_tie = token;
    if (out.support != nullptr) out.support[row * out.support_size] = static_cast<int32_t>(softmax.argmax);
  }

  const bool inside = token >= 0 && token < vocab;
  const float tempered = inside ? static_cast<float>(scaled(z) - log_sum) : kNan;
  float processed = tempered;
  if (inside && !kept)
    processed = -kInf;
  else if (inside && single)
    processed = 0;
  else if (inside && filtered)
    processed = static_cast<float>(scaled(z) - log_kept);
  out.token_ids[row] = token;
  if (out.raw_logprobs != nullptr)
    out.raw_logprobs[row] =
        inside ? static_cast<float>(static_cast<double>(x) - softmax.max_x - std::log(softmax.sum_x)) : kNan;
  out.tempered_logprobs[row] = tempered;
  out.processed_logprobs[row] = processed;
  out.kept_mass[row] = static_cast<float>(kept_mass);
  out.kept_count[row] = kept_count;
  if (out.entropy != nullptr) out.entropy[row] = static_cast<float>(log_sum - softmax.weighted / softmax.sum);
  if (out.rank != nullptr) {
    const float* group_max = in.group_max + row * groups;
    const int64_t last = in.rank_ties == RankTies::first ? token : in.rank_ties == RankTies::max ? vocab - 1 : last_tie;
    const bool is_first = token == softmax.argmax && last == token;
    out.rank[row] = !inside ? 0 : is_first ? 1 : rank_of(read, group_max, vocab, z, last);
  }
  out.valid[row] = true;
  if (out.row_max != nullptr) out.row_max[row] = softmax.max;
  if (out.log_sum != nullptr) out.log_sum[row] = static_cast<float>(log_sum);
}

}  // namespace

int sampling_statistics(const SamplingInputs& in) {
  const int64_t splits = (in.vocab + kSamplingSplit - 1) / kSamplingSplit, pairs = in.rows * splits;
  const int64_t turn = pairs < 256 ? 1 : 16;  // in turn: rows that are skipped come in runs
  with_type(in.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel if (pairs > 1 && in.rows * in.vocab >= kParallel)
    {
      const FlushDenormals scope;
#pragma omp for schedule(static, turn)
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t row = pair / splits;
        if (in.skip == nullptr || in.skip[row] == 0) split<T>(in, row, pair % splits);
      }
    }
  });
  return 0;
}

int sampling_finish(const SamplingFinish& f) {
  const SamplingInputs& in = f.inputs;
  // without FlushDenormals: a logit may be one, and here it is compared
#pragma omp parallel for schedule(dynamic, 1) if (in.rows > 1 && in.rows * in.whole_vocab >= kParallel)
  for (int64_t row = 0; row < in.rows; ++row)
    if (in.skip == nullptr || in.skip[row] == 0) finish(in, f.outputs, row);
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
