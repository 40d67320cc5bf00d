#include "emulation.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"

namespace rlkernel::emulation {
namespace {

constexpr size_t kStack = 256 << 10;
constexpr unsigned kGroup = 32;
constexpr size_t kSharedMemory = 48 << 10;  // what every GPU gives a block without being asked

enum class State { ready, at_barrier, exchanging, voting, done };

struct Fiber {
  Context context;
  Index index;
  State state = State::ready;
  Site site = {};
  uint64_t value = 0;  // given to the lanes that meet, then what this lane got
  int source = 0, width = 0;
};

bool same_place(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.site.line == b.site.line && std::strcmp(a.site.file, b.site.file) == 0;
}

class Block {
 public:
  Block(unsigned threads, const std::function<void()>& kernel)
      : fibers_(threads), stacks_(new char[threads * kStack]), shared_(kSharedMemory + 16), kernel_(kernel) {
    size_.x = threads;
  }

  void run(Index index, Index grid, std::mt19937_64* random) {
    index_ = index;
    grid_ = grid;
    sites_.clear();
    used_ = 0;
    std::fill(shared_.begin(), shared_.end(), static_cast<char>(0xff));  // NaN in every word
    ready_.resize(fibers_.size());
    for (unsigned t = 0; t < fibers_.size(); ++t) {
      fibers_[t].index.x = t;
      fibers_[t].state = State::ready;
      fibers_[t].context.prepare(stacks_.get() + t * kStack, kStack, &Block::enter);
      ready_[t] = static_cast<unsigned>(fibers_.size()) - 1 - t;  // taken from the end: in order where nothing is drawn
    }
    rank_.clear();
    if (random && (*random)() % 2) {
      rank_.resize((fibers_.size() + kGroup - 1) / kGroup);
      std::iota(rank_.begin(), rank_.end(), 0u);
      std::shuffle(rank_.begin(), rank_.end(), *random);
    }
    running_block = this;
    while (!ready_.empty()) {
      if (random) std::swap(ready_[draw(*random)], ready_.back());
      current_ = &fibers_[ready_.back()];
      ready_.pop_back();
      scheduler_.switch_to(current_->context);
    }
    if (std::any_of(fibers_.begin(), fibers_.end(), [](const Fiber& f) { return f.state != State::done; }))
      throw std::runtime_error(stuck());
  }

  void wait(State state, Site site) {
    current_->state = state;
    current_->site = site;
    if (state == State::at_barrier) meet(0, fibers_.size());
    else meet(current_->index.x / current_->width * current_->width, current_->width);
    current_->context.switch_to(scheduler_);
  }

  void* shared_memory(const void* site, size_t bytes) {
    for (const auto& [known, offset] : sites_)
      if (known == site) return base() + offset;
    if (used_ + bytes > kSharedMemory) throw std::runtime_error("a block must use at most 48 KiB of shared memory");
    sites_.emplace_back(site, used_);
    used_ += (bytes + 15) / 16 * 16;
    return base() + sites_.back().second;
  }

  Fiber& current() { return *current_; }
  const Index& index() const { return index_; }
  const Index& size() const { return size_; }
  const Index& grid() const { return grid_; }

  static thread_local Block* running_block;

 private:
  // Which ready thread goes on. Half of the blocks draw among all, which keeps them abreast; the others let the groups of
  // 32 run in a drawn order of rank, so that some are a row ahead of others where no barrier holds them.
  size_t draw(std::mt19937_64& random) const {
    if (rank_.empty()) return random() % ready_.size();
    const auto rank = [this](unsigned thread) { return rank_[thread / kGroup]; };
    const auto first = std::min_element(ready_.begin(), ready_.end(), [&](unsigned a, unsigned b) { return rank(a) < rank(b); });
    return first - ready_.begin();
  }

  static void enter() {
    Block& block = *running_block;
    Context::entered(block.scheduler_);
    block.kernel_();
    block.current_->state = State::done;
    block.current_->context.switch_to(block.scheduler_);
    std::abort();  // a finished fiber is never resumed
  }

  char* base() {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared_.data()) + 15) & ~uintptr_t{15});
  }

  // Lets the threads [begin, begin + count) go on when all of them stand where the current one does.
  void meet(size_t begin, size_t count) {
    if (begin + count > fibers_.size()) return;  // lanes that do not exist never come: reported as divergence
    Fiber* const lanes = &fibers_[begin];
    for (size_t i = 0; i < count; ++i)
      if (!same_place(lanes[i], *current_)) return;
    std::vector<uint64_t> results(count);
    for (size_t i = 0; i < count; ++i) {
      if (lanes[i].state == State::exchanging) results[i] = lanes[lanes[i].source % lanes[i].width].value;
      if (lanes[i].state == State::voting)
        for (size_t k = 0; k < count; ++k) results[i] |= static_cast<uint64_t>(lanes[k].value != 0) << k;
    }
    for (size_t i = 0; i < count; ++i) {
      lanes[i].value = results[i];
      lanes[i].state = State::ready;
      ready_.push_back(static_cast<unsigned>(begin + count - 1 - i));
    }
  }

  std::string stuck() const {
    std::vector<std::pair<std::string, int>> places;
    for (const Fiber& f : fibers_) {
      std::string place = "left the kernel";
      if (f.state != State::done) {
        const char* name = std::strrchr(f.site.file, '/');
        place = "wait at " + std::string(name ? name + 1 : f.site.file) + ":" + std::to_string(f.site.line);
      }
      const auto known = std::find_if(places.begin(), places.end(), [&](const auto& p) { return p.first == place; });
      if (known == places.end()) places.emplace_back(place, 1);
      else ++known->second;
    }
    std::string text = "divergent barrier in block " + std::to_string(index_.x);
    for (size_t i = 0; i < places.size(); ++i)
      text += (i ? ", " : ": ") + std::to_string(places[i].second) + " threads " + places[i].first;
    return text;
  }

  std::vector<Fiber> fibers_;
  std::unique_ptr<char[]> stacks_;
  std::vector<char> shared_;
  const std::function<void()>& kernel_;
  std::vector<std::pair<const void*, size_t>> sites_;
  size_t used_ = 0;
  std::vector<unsigned> ready_, rank_;
  Context scheduler_;
  Fiber* current_ = nullptr;
  Index index_, size_, grid_;
};

thread_local Block* Block::running_block = nullptr;

}  // namespace

Settings& settings() {
  static Settings value;
  return value;
}

const Index& thread_index() { return Block::running_block->current().index; }
const Index& block_index() { return Block::running_block->index(); }
const Index& block_size() { return Block::running_block->size(); }
const Index& grid_size() { return Block::running_block->grid(); }

void barrier(Site site) { Block::running_block->wait(State::at_barrier, site); }

void* shared_memory(const void* site, size_t bytes) { return Block::running_block->shared_memory(site, bytes); }

uint64_t exchange(uint64_t value, int source_lane, int width, Site site) {
  Fiber& fiber = Block::running_block->current();
  fiber.value = value;
  fiber.source = source_lane;
  fiber.width = width;
  Block::running_block->wait(State::exchanging, site);
  return fiber.value;
}

uint64_t vote(bool value, int width, Site site) {
  Fiber& fiber = Block::running_block->current();
  fiber.value = value;
  fiber.width = width;
  Block::running_block->wait(State::voting, site);
  return fiber.value;
}

void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  launch_all(std::min(blocks, settings().max_blocks), threads, kernel);
}

void launch_all(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  const Settings now = settings();
  Block block(threads, kernel);
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(now.seed);
  if (now.seed) std::shuffle(order.begin(), order.end(), random);
  for (const unsigned b : order) block.run({b}, {blocks}, now.seed ? &random : nullptr);
}

}  // namespace rlkernel::emulation
