// What the sources of a variant need. Included before the instruction set is chosen: an inline
// function of the standard library must not be compiled for one CPU and linked for all.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "tiles.h"
