/* The header compiled as C11, and the layout that callers in other languages rely on (python/qla/_ffi.py mirrors it). */
#include <stddef.h>

#include "qla/qla.h"

#define SAME(what, bytes) \
  _Static_assert((what) == (bytes), #what " changed: bump the version, and tell every mirror of the header")

SAME(sizeof(qla_tensor), 80);
SAME(offsetof(qla_tensor, shape), 16);
SAME(offsetof(qla_tensor, stride), 48);

SAME(sizeof(qla_gdn_forward_args), 1768);
SAME(offsetof(qla_gdn_forward_args, stream), 16);
SAME(offsetof(qla_gdn_forward_args, workspace_bytes), 32);
SAME(offsetof(qla_gdn_forward_args, num_threads), 40);
SAME(offsetof(qla_gdn_forward_args, flags), 44);
SAME(offsetof(qla_gdn_forward_args, scale), 48);
SAME(offsetof(qla_gdn_forward_args, q), 56);

SAME(offsetof(qla_gdn_forward_args, o), 616);
SAME(offsetof(qla_gdn_forward_args, checkpoint_every_n_tokens), 1176);
SAME(offsetof(qla_gdn_forward_args, saved), 1664);
SAME(offsetof(qla_gdn_forward_args, cp_mode), 1744);

SAME(sizeof(qla_gdn_backward_args), 2080);
SAME(offsetof(qla_gdn_backward_args, q), 56);
SAME(offsetof(qla_gdn_backward_args, saved), 1176);
SAME(offsetof(qla_gdn_backward_args, d_o), 1256);
SAME(offsetof(qla_gdn_backward_args, cp_mode), 2056);

SAME(sizeof(qla_segment), 48);
SAME(offsetof(qla_plan, segments), 80);
SAME(offsetof(qla_plan, reason), 96);
SAME(offsetof(qla_plan, uncut_chunks), 352);
SAME(sizeof(qla_plan), 360);
SAME(sizeof(qla_device_info_t), 480);

/* Every function can be named from C. */
int qla_test_header_from_c(void) {
  const void* functions[] = {(const void*)(size_t)qla_version,
                             (const void*)(size_t)qla_build_info,
                             (const void*)(size_t)qla_last_error,
                             (const void*)(size_t)qla_status_name,
                             (const void*)(size_t)qla_cpu_level,
                             (const void*)(size_t)qla_device_count,
                             (const void*)(size_t)qla_device_info,
                             (const void*)(size_t)qla_prepare,
                             (const void*)(size_t)qla_gdn_forward_check,
                             (const void*)(size_t)qla_gdn_backward_check,
                             (const void*)(size_t)qla_gdn_forward_workspace,
                             (const void*)(size_t)qla_gdn_forward_saved,
                             (const void*)(size_t)qla_gdn_backward_workspace,
                             (const void*)(size_t)qla_gdn_forward,
                             (const void*)(size_t)qla_gdn_backward,
                             (const void*)(size_t)qla_gdn_plan,
                             (const void*)(size_t)qla_plan_print};
  int count = 0;
  for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); ++i) count += functions[i] != NULL;
  return count;
}
