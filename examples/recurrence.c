/* The smallest call from C: one head of one number, two tokens, checked by hand.
 *
 * K = V = 1, q = k = 1, g = ln 0.5, beta = 0.5, v = (4, 8):
 *   state: 0 * 0.5 + 0.5 * (4 - 0) = 2;   2 * 0.5 + 0.5 * (8 - 1) = 4.5.   So o = (2, 4.5).
 *
 *   cc -std=c11 recurrence.c -I... -L... -lqla -lm -o recurrence (docs/c-api.md says where header and library are)
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "qla/qla.h"

static qla_tensor tensor(float* data, int32_t ndim, int64_t tokens) {
  qla_tensor t = {0}; /* [1, tokens, 1, 1] or [1, tokens, 1], contiguous */
  t.data = data;
  t.dtype = QLA_FLOAT32;
  t.ndim = ndim;
  for (int32_t i = 0; i < ndim; ++i) {
    t.shape[i] = i == 1 ? tokens : 1;
    t.stride[i] = i == 0 ? tokens : 1;
  }
  return t;
}

int main(void) {
  float q[2] = {1, 1}, k[2] = {1, 1}, v[2] = {4, 8}, beta[2] = {0.5f, 0.5f}, o[2] = {0, 0};
  float g[2] = {logf(0.5f), logf(0.5f)};

  qla_gdn_forward_args args = {0};
  args.struct_size = sizeof(args);
  args.device = -1; /* host memory */
  args.scale = 1.0;
  args.cp_warmup_threshold = NAN;
  args.q = tensor(q, 4, 2);
  args.k = tensor(k, 4, 2);
  args.v = tensor(v, 4, 2);
  args.o = tensor(o, 4, 2);
  args.g = tensor(g, 3, 2);
  args.beta = tensor(beta, 3, 2);

  size_t bytes = 0;
  if (qla_gdn_forward_workspace(&args, &bytes) != QLA_OK) {
    fprintf(stderr, "%s\n", qla_last_error());
    return 1;
  }
  args.workspace_bytes = (bytes + 255) / 256 * 256;
  args.workspace = bytes ? aligned_alloc(256, args.workspace_bytes) : NULL;
  const qla_status status = qla_gdn_forward(&args);
  free(args.workspace);
  if (status != QLA_OK) {
    fprintf(stderr, "%s\n", qla_last_error());
    return 1;
  }
  printf("o = (%g, %g), expected (2, 4.5)\n", o[0], o[1]);
  return fabsf(o[0] - 2.0f) < 1e-5f && fabsf(o[1] - 4.5f) < 1e-5f ? 0 : 1;
}
