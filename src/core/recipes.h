// The named recipes and the names of their fields' values.
#pragma once

#include "vcattn/vcattn.h"

namespace vcattn {

// Refuses a combination that no back end defines, naming the two fields that disagree.
vcattn_code validate_recipe(const vcattn_recipe& recipe, vcattn_message* message);

inline bool is_expcast(const vcattn_recipe& r) {
  return r.p_format == VCATTN_P_EXPCAST || r.p_format == VCATTN_P_EXPCAST_TWO_LINES;
}
inline bool has_phases(const vcattn_recipe& r) { return r.p_format == VCATTN_P_EXPCAST && r.p_phases == 2; }

}  // namespace vcattn
