// Work sharing between the thread that runs a kernel and helpers on XLA's pool.
#pragma once

#include <cstdint>

namespace minfer {

// XLA's thread pool, as a handler gets it (team.cpp knows it; kernels only pass it on).
struct Pool;

// Runs body(data, 0) ... body(data, n - 1), each once, on the caller's thread and on helpers.
void share(const Pool& pool, uint32_t n, void (*body)(void* data, uint32_t chunk), void* data);

// Threads that share a kernel, the caller included.
uint32_t threads(const Pool& pool);

}  // namespace minfer
