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

enum class State { ready, at_barrier, at_cluster_barrier, exchanging, voting, done };

struct Fiber {
  Context context;
  Index index;
  unsigned block = 0;  // of the cluster
  State state = State::ready;
  Site site = {};
  uint64_t value = 0;  // given to the lanes that meet, then what this lane got
  int source = 0, width = 0;
};

bool same_place(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.site.line == b.site.line && std::strcmp(a.site.file, b.site.file) == 0;
}

// Kept from launch to launch: the system clears fresh pages, and a sanitizer marks all of them, which takes longer than most kernels.
char* stacks_of(size_t bytes) {
  thread_local std::unique_ptr<char[]> kept;
  thread_local size_t room = 0;
  if (room < bytes) {
    kept.reset();
    kept.reset(new char[bytes]);
    room = bytes;
  }
  return kept.get();
}

// Blocks that run at once: one, where the grid has no clusters.
class Cluster {
 public:
  Cluster(unsigned blocks, unsigned threads, const std::function<void()>& kernel)
      : fibers_(blocks * threads), stacks_(stacks_of(blocks * threads * kStack)), shared_(blocks), running_(blocks), kernel_(kernel) {
    size_.x = threads;
    for (std::vector<char>& memory : shared_) memory.resize(kSharedMemory + 16);
  }

  void run(Index first, Index grid, std::mt19937_64* random) {
    first_ = first;
    grid_ = grid;
    sites_.clear();
    used_ = 0;
    fault_.clear();
    for (unsigned b = 0; b < blocks(); ++b) wipe(b);
    std::fill(running_.begin(), running_.end(), size_.x);
    ready_.resize(fibers_.size());
    for (unsigned f = 0; f < fibers_.size(); ++f) {
      fibers_[f].index.x = f % size_.x;
      fibers_[f].block = f / size_.x;
      fibers_[f].state = State::ready;
      fibers_[f].context.prepare(stacks_ + f * kStack, kStack, &Cluster::enter);
      ready_[f] = static_cast<unsigned>(fibers_.size()) - 1 - f;  // taken from the end: in order where nothing is drawn
    }
    rank_.clear();
    if (random && (*random)() % 2) {
      ranked_ = kGroup;
      if (blocks() > 1 && (*random)() % 2) ranked_ = size_.x;  // blocks by themselves, each as far as it gets
      rank_.resize((fibers_.size() + ranked_ - 1) / ranked_);
      std::iota(rank_.begin(), rank_.end(), 0u);
      std::shuffle(rank_.begin(), rank_.end(), *random);
    }
    if (!rank_.empty()) std::make_heap(ready_.begin(), ready_.end(), Later{this});
    running_cluster = this;
    while (!ready_.empty()) {
      choose(random);
      current_ = &fibers_[ready_.back()];
      ready_.pop_back();
      scheduler_.switch_to(current_->context);
      if (!fault_.empty()) throw std::runtime_error(fault_);
    }
    if (std::any_of(fibers_.begin(), fibers_.end(), [](const Fiber& f) { return f.state != State::done; }))
      throw std::runtime_error(stuck());
  }

  void wait(State state, Site site) {
    current_->state = state;
    current_->site = site;
    const size_t block = current_->block * size_.x;
    if (state == State::at_cluster_barrier) meet(0, fibers_.size());
    else if (state == State::at_barrier) meet(block, size_.x);
    else meet(block + current_->index.x / current_->width * current_->width, current_->width);
    current_->context.switch_to(scheduler_);
  }

  void* shared_memory(const void* site, size_t bytes) {
    for (const auto& [known, offset] : sites_)
      if (known == site) return base(current_->block) + offset;
    if (used_ + bytes > kSharedMemory) fail("a block must use at most 48 KiB of shared memory");
    sites_.emplace_back(site, used_);
    used_ += (bytes + 15) / 16 * 16;
    return base(current_->block) + sites_.back().second;
  }

  void* of_block(void* mine, unsigned rank) {
    const std::ptrdiff_t offset = static_cast<char*>(mine) - base(current_->block);
    if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(used_)) fail("what another block has must lie in shared memory");
    if (rank >= blocks()) fail("block " + std::to_string(rank) + " is none of a cluster of " + std::to_string(blocks()));
    if (running_[rank] == 0) fail("the shared memory of block " + std::to_string(rank) + " of a cluster is used when it has left the kernel");
    return base(rank) + offset;
  }

  Fiber& current() { return *current_; }
  Index block_index() const { return {first_.x + current_->block}; }
  Index size() const { return size_; }
  Index grid() const { return grid_; }
  unsigned blocks() const { return static_cast<unsigned>(shared_.size()); }

  static thread_local Cluster* running_cluster;

 private:
  // Which ready thread goes on. Half of the clusters draw among all, which keeps them abreast; the others let the groups of
  // 32, or the blocks, run in a drawn order of rank, so that some are a row ahead of others where no barrier holds them.
  void choose(std::mt19937_64* random) {
    if (!rank_.empty()) std::pop_heap(ready_.begin(), ready_.end(), Later{this});
    else if (random) std::swap(ready_[(*random)() % ready_.size()], ready_.back());
  }

  struct Later {
    const Cluster* cluster;
    bool operator()(unsigned a, unsigned b) const {
      return cluster->rank_[a / cluster->ranked_] > cluster->rank_[b / cluster->ranked_];
    }
  };

  static void enter() {
    Cluster& cluster = *running_cluster;
    Context::entered(cluster.scheduler_);
    cluster.kernel_();
    Fiber& fiber = *cluster.current_;
    fiber.state = State::done;
    if (--cluster.running_[fiber.block] == 0) cluster.wipe(fiber.block);  // a pointer into it may be left
    fiber.context.switch_to(cluster.scheduler_);
    std::abort();  // a finished fiber is never resumed
  }

  // The stack of a fiber cannot be unwound, so the scheduler throws.
  [[noreturn]] void fail(const std::string& fault) {
    fault_ = fault;
    current_->context.switch_to(scheduler_);
    std::abort();  // the cluster runs no further
  }

  void wipe(unsigned block) {
    std::fill(shared_[block].begin(), shared_[block].end(), static_cast<char>(0xff));  // NaN in every word
  }

  char* base(unsigned block) {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared_[block].data()) + 15) & ~uintptr_t{15});
  }

  // Lets the threads [begin, begin + count) go on when all of them stand where the current one does.
  void meet(size_t begin, size_t count) {
    const size_t end = current_->state == State::at_cluster_barrier ? fibers_.size() : (current_->block + 1) * size_.x;
    if (begin + count > end) return;  // lanes that do not exist never come: reported as divergence
    Fiber* const lanes = &fibers_[begin];
    for (size_t i = count; i-- > 0;)  // from the end: in order the last one comes last
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
      if (!rank_.empty()) std::push_heap(ready_.begin(), ready_.end(), Later{this});
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
    std::string text = "divergent barrier in block " + std::to_string(first_.x);
    if (blocks() > 1) text += " to " + std::to_string(first_.x + blocks() - 1);
    for (size_t i = 0; i < places.size(); ++i)
      text += (i ? ", " : ": ") + std::to_string(places[i].second) + " threads " + places[i].first;
    return text;
  }

  std::vector<Fiber> fibers_;
  char* stacks_;
  std::vector<std::vector<char>> shared_;  // of each block; a site lies at the same place in all
  std::vector<unsigned> running_;          // threads of each block that are in the kernel
  const std::function<void()>& kernel_;
  std::vector<std::pair<const void*, size_t>> sites_;
  size_t used_ = 0;
  std::vector<unsigned> ready_, rank_;
  unsigned ranked_ = kGroup;  // threads that share a rank
  std::string fault_;
  Context scheduler_;
  Fiber* current_ = nullptr;
  Index first_, size_, grid_;
};

thread_local Cluster* Cluster::running_cluster = nullptr;

}  // namespace

Settings& settings() {
  static Settings value;
  return value;
}

const Index& thread_index() { return Cluster::running_cluster->current().index; }
Index block_index() { return Cluster::running_cluster->block_index(); }
Index block_size() { return Cluster::running_cluster->size(); }
Index grid_size() { return Cluster::running_cluster->grid(); }

unsigned cluster_size() { return Cluster::running_cluster->blocks(); }
unsigned cluster_rank() { return Cluster::running_cluster->current().block; }

namespace {
bool is_missing(Site site) {
  const auto& missing = settings().missing;
  if (site.line != missing.line) return false;
  const std::string file = site.file;
  return file.size() >= missing.file.size() &&
         file.compare(file.size() - missing.file.size(), std::string::npos, missing.file) == 0;
}

void wait_unless_missing(State state, Site site) {
  if (!is_missing(site)) Cluster::running_cluster->wait(state, site);
}
}  // namespace

void barrier(Site site) { wait_unless_missing(State::at_barrier, site); }

void cluster_barrier(Site site) { wait_unless_missing(State::at_cluster_barrier, site); }

void* of_block(void* mine, unsigned rank) { return Cluster::running_cluster->of_block(mine, rank); }

void* shared_memory(const void* site, size_t bytes) { return Cluster::running_cluster->shared_memory(site, bytes); }

uint64_t exchange(uint64_t value, int source_lane, int width, Site site) {
  Fiber& fiber = Cluster::running_cluster->current();
  fiber.value = value;
  fiber.source = source_lane;
  fiber.width = width;
  Cluster::running_cluster->wait(State::exchanging, site);
  return fiber.value;
}

uint64_t vote(bool value, int width, Site site) {
  Fiber& fiber = Cluster::running_cluster->current();
  fiber.value = value;
  fiber.width = width;
  Cluster::running_cluster->wait(State::voting, site);
  return fiber.value;
}

namespace {
void run_grid(unsigned clusters, unsigned size, unsigned threads, const std::function<void()>& kernel) {
  const Settings now = settings();
  Cluster cluster(size, threads, kernel);
  std::vector<unsigned> order(clusters);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(now.seed);
  if (now.seed) std::shuffle(order.begin(), order.end(), random);
  for (const unsigned c : order) cluster.run({c * size}, {clusters * size}, now.seed ? &random : nullptr);
}
}  // namespace

void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  run_grid(std::min(blocks, settings().max_blocks), 1, threads, kernel);
}

void launch_all(unsigned blocks, unsigned threads, const std::function<void()>& kernel) { run_grid(blocks, 1, threads, kernel); }

void launch_clusters(unsigned clusters, unsigned size, unsigned threads, const std::function<void()>& kernel) {
  run_grid(std::min(clusters, settings().max_blocks), size, threads, kernel);
}

}  // namespace rlkernel::emulation
