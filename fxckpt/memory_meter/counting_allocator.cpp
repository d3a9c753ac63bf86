// An allocator that counts the bytes requested from torch's CPU allocator, which it wraps.
//
// Every block still comes from the wrapped allocator, on the thread that asked, so that alignment,
// errors and the profiler's memory events stay torch's own. Only the deleter of a block is
// replaced, as DataPtr::compare_exchange_deleter describes.

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>

namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
constexpr auto kRelaxed = std::memory_order_relaxed;

std::atomic<int64_t> live{0};  // bytes
std::atomic<int64_t> peak{0};  // greatest `live` since the last fxckpt_take_peak
std::atomic<int64_t> limit{kNoLimit};
std::atomic<int64_t> refused{0};  // blocks that could not be had
std::atomic<bool> missed{false};  // whether a block could not be counted

// What one thread took and did not release yet; blocks may be released by another thread.
struct Thread {
  std::atomic<int64_t> live{0};  // bytes
  std::atomic<int64_t> peak{0};  // greatest `live` since the last fxckpt_watch_threads
  std::atomic<int64_t> start{0};  // `live` at that time
  Thread* next = nullptr;

  void take(int64_t bytes) {
    const int64_t now = live.fetch_add(bytes, kRelaxed) + bytes;
    if (now > peak.load(kRelaxed)) {  // no other thread raises it
      peak.store(now, kRelaxed);
    }
  }
};

// All threads that ever took a block, a list that only grows; never deleted, as blocks name them.
std::atomic<Thread*> threads{nullptr};

Thread& this_thread() {
  thread_local Thread* const mine = [] {
    auto* const made = new Thread;
    made->next = threads.load();
    while (!threads.compare_exchange_weak(made->next, made)) {
    }
    return made;
  }();
  return *mine;
}

struct Block {
  int64_t bytes = 0;
  Thread* taker = nullptr;
};

// Requested bytes of each block, by address, in shards so that threads rarely wait for another.
class Blocks {
 public:
  void insert(void* block, Block made) {
    Shard& shard = of(block);
    std::lock_guard<std::mutex> guard(shard.mutex);
    shard.blocks[block] = made;
  }

  // Return a block and forget it; one without bytes or thread if it was not counted.
  Block erase(void* block) {
    Shard& shard = of(block);
    std::lock_guard<std::mutex> guard(shard.mutex);
    const auto found = shard.blocks.find(block);
    if (found == shard.blocks.end()) {
      return {};
    }
    const Block erased = found->second;
    shard.blocks.erase(found);
    return erased;
  }

  void lock() {
    for (Shard& shard : shards_) {
      shard.mutex.lock();
    }
  }

  void unlock() {
    for (Shard& shard : shards_) {
      shard.mutex.unlock();
    }
  }

 private:
  struct alignas(64) Shard {
    std::mutex mutex;
    ska::flat_hash_map<void*, Block> blocks;
  };

  Shard& of(void* block) {
    // Blocks are aligned to 64 bytes, and the large ones to pages: multiply, and take high bits.
    const auto address = reinterpret_cast<uintptr_t>(block);
    return shards_[(address * 0x9E3779B97F4A7C15ull) >> 58];
  }

  std::array<Shard, 64> shards_;
};

// Never deleted: static objects of other libraries free blocks until the very end of the process.
Blocks& blocks() {
  static Blocks* const all = new Blocks;
  return *all;
}

class CountingAllocator;
CountingAllocator* counting = nullptr;

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* wrapped)
      : wrapped_(wrapped), delete_(wrapped->raw_deleter()) {}

  c10::DataPtr allocate(size_t size) override {
    const auto bytes = static_cast<int64_t>(size);
    if (bytes <= 0) {  // nothing, or a size that the wrapped allocator refuses
      return wrapped_->allocate(size);
    }
    const int64_t now = live.fetch_add(bytes, kRelaxed) + bytes;
    try {
      if (now > limit.load(kRelaxed)) {
        refuse(size);
      }
      c10::DataPtr block = wrapped_->allocate(size);
      if (!own(block, bytes)) {
        live.fetch_sub(bytes, kRelaxed);
        missed.store(true, kRelaxed);
        return block;
      }
      int64_t seen = peak.load(kRelaxed);
      while (now > seen && !peak.compare_exchange_weak(seen, now, kRelaxed)) {
      }
      this_thread().take(bytes);
      return block;
    } catch (...) {
      live.fetch_sub(bytes, kRelaxed);
      refused.fetch_add(1, kRelaxed);
      throw;
    }
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    wrapped_->copy_data(to, from, count);
  }

  // Count a block that the wrapped allocator made before, while its storage is held.
  int64_t adopt(c10::StorageImpl& storage) {
    if (storage.allocator() == wrapped_) {
      storage.set_allocator(this);  // the storage may grow
    }
    // A fake tensor's storage may have a symbolic size.
    const int64_t bytes = storage.sym_nbytes().maybe_as_int().value_or(0);
    if (bytes <= 0 || !own(storage._mutable_data_ptr_no_checks(), bytes)) {
      return 0;
    }
    live.fetch_add(bytes, kRelaxed);
    this_thread().take(bytes);
    return bytes;
  }

 private:
  // Take over the release of a block. Return false for a block of another making.
  bool own(c10::DataPtr& block, int64_t bytes) {
    void* const address = block.get_context();
    if (address == nullptr || address != block.get() || block.get_deleter() != delete_) {
      return false;
    }
    blocks().insert(address, {bytes, &this_thread()});
    return block.compare_exchange_deleter(delete_, &release);
  }

  // oneDNN returns raw blocks to whichever allocator is set: one that is unknown is older than
  // this.
  static void release(void* block) {
    if (block == nullptr) {
      return;
    }
    // First, as another thread may be given the address once the block is free.
    const Block erased = blocks().erase(block);
    if (erased.taker != nullptr) {
      live.fetch_sub(erased.bytes, kRelaxed);
      erased.taker->live.fetch_sub(erased.bytes, kRelaxed);
    }
    counting->delete_(block);
  }

  [[noreturn]] static void refuse(size_t size) {
    c10::profiledCPUMemoryReporter().OutOfMemory(size);
    throw c10::Error(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        "[enforce fail at alloc_cpu.cpp] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate " + std::to_string(size) +
            " bytes. Error code 12 (Cannot allocate memory)");
  }

  c10::Allocator* const wrapped_;
  const c10::DeleterFnPtr delete_;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Return whether every new block is counted from now on. Call it under one lock.
int fxckpt_install() {
  if (counting == nullptr) {
    c10::Allocator* const present = c10::GetCPUAllocator();
    if (present->raw_deleter() == nullptr) {
      return 0;  // its blocks cannot be told apart
    }
    // A fork in the middle of an insertion would leave the child a locked shard.
    pthread_atfork(
        [] { blocks().lock(); }, [] { blocks().unlock(); }, [] { blocks().unlock(); });
    counting = new CountingAllocator(present);
    for (int priority = 0; priority < 256 && c10::GetCPUAllocator() != counting; ++priority) {
      c10::SetCPUAllocator(counting, static_cast<uint8_t>(priority));
    }
  }
  return c10::GetCPUAllocator() == counting;
}

// Return whether every block since then was counted, and the next one will be.
int fxckpt_is_exact() {
  return !missed.load(kRelaxed) && c10::GetCPUAllocator() == counting;
}

int64_t fxckpt_adopt(c10::StorageImpl* storage) {
  return storage == nullptr ? 0 : counting->adopt(*storage);
}

int64_t fxckpt_allocated() {
  return live.load(kRelaxed);
}

int64_t fxckpt_peak() {
  return peak.load(kRelaxed);
}

// Return the peak so far, and begin anew at what is allocated now.
int64_t fxckpt_take_peak() {
  return peak.exchange(live.load(kRelaxed), kRelaxed);
}

// Return the number of blocks that could not be had.
int64_t fxckpt_refused() {
  return refused.load(kRelaxed);
}

// Begin the peaks of all threads anew at what each holds now. Blocks of threads that run meanwhile
// may be missed.
void fxckpt_watch_threads() {
  for (Thread* thread = threads.load(); thread != nullptr; thread = thread->next) {
    thread->start.store(thread->live.load(kRelaxed), kRelaxed);
    thread->peak.store(thread->live.load(kRelaxed), kRelaxed);
  }
}

// Return the sum over all threads of the most bytes that each took above what it held at the last
// fxckpt_watch_threads: the peak of all of them if their peaks fall together.
int64_t fxckpt_peak_of_threads() {
  int64_t sum = 0;
  for (Thread* thread = threads.load(); thread != nullptr; thread = thread->next) {
    sum += thread->peak.load(kRelaxed) - thread->start.load(kRelaxed);
  }
  return sum;
}

// Refuse blocks that would lift the bytes in use above `bytes`. Return the limit before.
int64_t fxckpt_set_limit(int64_t bytes) {
  return limit.exchange(bytes, kRelaxed);
}

}  // extern "C"
#pragma GCC visibility pop
