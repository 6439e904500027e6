// What `share` needs of XLA's thread pool.
#pragma once

#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace minfer {

struct Pool {
  xla::ffi::ThreadPool* xla;
  uint32_t threads;  // that share a kernel, the caller's included

  void schedule(void (*task)(uint32_t), uint32_t argument) const {
    xla->Schedule([task, argument] { task(argument); });
  }
};

}  // namespace minfer
