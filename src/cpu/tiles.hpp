// Fills the tiles of one chunk: rows converted and normalised, products, gates and inverses of the value heads that want them.
#pragma once

#include "cpu/call.hpp"

namespace qla::cpu {

// Rows [token, token + rows) of `k_head` into tiles.chunk; norms are handed out where asked (forward's optional outputs).
template <class T>
void load_chunk(const Call<T>& call, const Sequence& seq, int64_t k_head, int64_t token, int rows, bool with_q,
                ChunkTiles<T>& chunk, T* q_rnorm, T* k_rnorm) {
  const auto& kernels = call.kernels;
  chunk.rows = rows;
  if (chunk.q_t) chunk.q_t = chunk.k_t + static_cast<int64_t>((rows + call.panel - 1) / call.panel) * call.panel * call.k_dim;
  kernels.load_rows(token_rows(*call.args.k, seq.batch, seq.bos + token, k_head), rows, call.k_dim, chunk.kq, chunk.ld);
  if (call.normalize) kernels.normalize_rows(chunk.kq, chunk.ld, rows, call.k_dim, k_rnorm);
  if (with_q) {
    T* q = chunk.kq + static_cast<int64_t>(rows) * chunk.ld;
    kernels.load_rows(token_rows(*call.args.q, seq.batch, seq.bos + token, k_head), rows, call.k_dim, q, chunk.ld);
    if (call.normalize) kernels.normalize_rows(q, chunk.ld, rows, call.k_dim, q_rnorm);
    if (chunk.q_t) kernels.transpose_to_panels(q, chunk.ld, rows, call.k_dim, chunk.q_t);
  }
  kernels.transpose_to_panels(chunk.kq, chunk.ld, rows, call.k_dim, chunk.k_t);
  kernels.products(chunk, with_q);
}

}  // namespace qla::cpu
