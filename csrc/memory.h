// Aligned memory for packed weights and for the buffers of passes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forerun {

inline size_t up_to(size_t n, size_t step) { return (n + step - 1) / step * step; }

void* allocate(size_t bytes);  // uses huge pages where the system has them; null where there is no memory
void* allocate_zeros(size_t bytes);
void release(void* data, size_t bytes);  // as many as were asked for
size_t allocated_bytes(size_t bytes);    // that the system gives for so many

// Memory that grows on demand; its contents are lost when it grows.
class Scratch {
  public:
    ~Scratch();
    void* bytes(size_t count);
    float* floats(size_t count) { return static_cast<float*>(bytes(count * sizeof(float))); }
    uint32_t* words(size_t count) { return static_cast<uint32_t*>(bytes(count * sizeof(uint32_t))); }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace forerun
