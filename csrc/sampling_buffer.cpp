// Memory for dense distributions: freed rows are kept for the next step.
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "process.h"
#include "sampling.h"

namespace forerun {

namespace {

constexpr int64_t POOLED_BYTES = 64 << 20;  // at most

struct Pool {
    std::mutex mutex;
    std::vector<std::pair<int64_t, std::unique_ptr<float[]>>> rows;  // (size, memory)
    int64_t num_bytes = 0;
};

// Never destroyed: a distribution may outlive everything else when the interpreter ends.
PerProcess<Pool>& pools = *new PerProcess<Pool>;

int64_t bytes_of(int64_t size) { return size * static_cast<int64_t>(sizeof(float)); }

}  // namespace

Buffer::Buffer(int64_t size) : size_(size) {
    Pool& pool = pools.get();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    auto& rows = pool.rows;
    for (size_t i = rows.size(); i-- > 0;)
        if (rows[i].first == size) {
            data_ = std::move(rows[i].second);
            rows.erase(rows.begin() + i);
            pool.num_bytes -= bytes_of(size);
            return;
        }
    data_.reset(new float[size]);
}

Buffer::~Buffer() {
    Pool& pool = pools.get();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    if (pool.num_bytes + bytes_of(size_) > POOLED_BYTES) return;
    pool.num_bytes += bytes_of(size_);
    pool.rows.emplace_back(size_, std::move(data_));
}

}  // namespace forerun
