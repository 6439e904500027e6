// The kernels for any CPU.

#include "variant.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace minfer {
namespace {
constexpr int kRows = 2;  // of activations at a time
#include "simd_portable.h"

#include "math.inc"

#include "norm.inc"

#include "formats.inc"

#include "products.inc"

#include "linear.inc"

#include "refine.inc"

#include "calls.inc"

#include "experts.inc"

#include "regions.inc"

#include "seen.inc"

#include "heads.inc"

#include "attend_few.inc"

#include "attention.inc"
}  // namespace
const Kernels kPortable = {"portable", linear, experts, take, add_normed, attend};
}  // namespace minfer
