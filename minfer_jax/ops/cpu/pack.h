// From the file's blocks to the tiled layout.
#pragma once

#include "tiles.h"

namespace minfer {

// Packs tiles first .. last - 1 of a matrix [rows, k], given as the file stores it, into `tiles`,
// where tile 0 of the matrix begins.
void pack_tiles(const Layout& layout, const uint8_t* raw, int64_t rows, int64_t k, int64_t first,
                int64_t last, uint8_t* tiles);

}  // namespace minfer
