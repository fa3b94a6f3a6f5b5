// The named recipes and the names of their fields' values.
#pragma once

#include "numerics/attention_math.h"
#include "vcattn/vcattn.h"

namespace vcattn {

// Refuses a combination that no back end defines, naming the two fields that disagree.
vcattn_code validate_recipe(const vcattn_recipe& recipe, vcattn_message* message);

inline bool is_expcast(const vcattn_recipe& r) {
  return r.p_format == VCATTN_P_EXPCAST || r.p_format == VCATTN_P_EXPCAST_TWO_LINES;
}
inline bool is_per_tile(const vcattn_recipe& r) { return r.row_max == VCATTN_MAX_TILE_OCTAVE; }
// Tiles that one softmax step covers.
inline int tiles_per_step(const vcattn_recipe& r) { return is_per_tile(r) ? r.tile_keys / kBlockN : 1; }
inline bool has_phases(const vcattn_recipe& r) { return r.p_format == VCATTN_P_EXPCAST && r.p_phases == 2; }

}  // namespace vcattn
