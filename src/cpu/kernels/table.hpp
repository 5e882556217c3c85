// What the level-specific code offers the rest of the CPU backend: plain structs and one table of functions a compute type and
// level.
//
// Included by code compiled for different instruction sets, so nothing here may be an inline function that a linker could merge.
//
// Panels. An [m, n] operand whose columns are the vector direction is stored as ceil(n / P) panels of [m][P], P = two vectors
// (table.panel): one panel of the state, 128 x 16 floats on AVX2, stays in L1, and no power-of-two stride thrashes it.
#pragma once

#include <cstdint>

namespace qla::cpu {

inline constexpr int kInnerChunk = 32;  // tokens a chunk of the CPU's own walk; 64 where A, g or h are handed out
inline constexpr int kMaxChunk = 64;
inline constexpr int kMaxDim = 256;

// Rows of one head of a caller's tensor: row t starts at data + t * stride elements; elements of a row are contiguous.
struct Rows {
  void* data;      // nullptr: absent
  int64_t stride;  // in elements
  int32_t dtype;   // QLA_*
};

// One chunk of one q/k head.
template <class T>
struct ChunkTiles {
  int rows, k_dim;
  int c;        // order and row length of the square matrices, >= rows
  int ld;       // row length of kq
  T* kq;        // [2 rows, ld] K rows, then Q rows
  T* k_t;       // panels of [k_dim][P]: K^T, columns are tokens; those past the last row are zero
  T* q_t;       // the same of Q, right behind the panels of K; nullptr in forward
  T* products;  // panels of [2 rows][P], columns are tokens of K: K K^T, then Q K^T
};

// One chunk of one value head.
template <class T>
struct HeadTiles {
  T* abar;                 // [c, c] (F3)
  T* pg;                   // [c, c] (F6)
  T* decay;                // [c, c] G of (F1); only for backward
  T *gamma, *tail, *beta;  // [c]
};

// (F4)-(F9) of one chunk and value head on panels [p_begin, p_end) of V.
template <class T>
struct Walk {
  const ChunkTiles<T>* chunk;
  const HeadTiles<T>* head;
  int v_dim;
  T scale;
  Rows v;             // first row of the chunk; absent: V = 0, the transition's walk (C2)
  Rows o;             // absent: state only
  const T* state_in;  // panels of [k_dim][P]
  T* state_out;       // may be state_in; nullptr: not wanted
  T* delta;           // panels of [c][P], or nullptr
  bool known_delta;   // delta holds Delta already: only (F8), (F9)
  // What the thread reads next, perhaps from another core's cache: asked for a line at a time, ahead_step bytes apart.
  const void* ahead;
  int64_t ahead_step;
};

// (B1)-(B4) of one chunk and value head on panels [p_begin, p_end) of V.
template <class T>
struct Reverse {
  const ChunkTiles<T>* chunk;
  const HeadTiles<T>* head;
  int v_dim;
  T scale;
  Rows d_o;             // absent: zero
  int64_t d_o_step;     // elements from one value to the next: a gradient may be an expanded view
  const T* d_state_in;  // dS+, panels of [k_dim][P]
  T* d_state_out;       // dS; may be d_state_in
  T* do_dr;             // panels of [2 c][P]: dO rows 0.., dR rows c..; or nullptr
  Rows dv;              // absent: not wanted
};

// (B5)-(B11) of one chunk and value head.
template <class T>
struct Grads {
  const ChunkTiles<T>* chunk;
  const HeadTiles<T>* head;
  int v_dim;
  T scale;
  const T *state, *d_state;  // S, dS+
  const T *delta, *do_dr;
  T *dq_t, *dk_t;  // panels of [k_dim][P], columns are tokens; added to unless first
  bool first;
  T *dg, *dbeta;  // [rows]
  T* scratch;     // table.grads_scratch(k_dim, v_dim) elements
};

template <class T>
struct KernelTable {
  int panel;  // P, columns
  // Converts rows [rows, n] to dst with row length ld, zero beyond n.
  void (*load_rows)(const Rows& src, int rows, int n, T* dst, int64_t ld);
  void (*store_rows)(const T* src, int64_t ld, int rows, int n, const Rows& dst);
  // dst = panels over `rows` of src^T: [n][P] each, columns past rows are zero
  void (*transpose_to_panels)(const T* src, int64_t ld, int rows, int n, T* dst);
  // the way back: dst[rows, n] (row length ld) from panels of [n][P]
  void (*transpose_from_panels)(const T* src, int rows, int n, T* dst, int64_t ld);
  // rows <- rows / sqrt(sum x^2 + 1e-6); norms: the inverse norms
  void (*normalize_rows)(T* data, int64_t ld, int rows, int n, T* rnorm);
  // Panels [p_begin, p_end) of a state in the caller's memory: rows over K of V values, or the other way round with v_first.
  void (*load_state)(const Rows& src, bool v_first, int k_dim, int v_dim, int p_begin, int p_end, T* panels);
  void (*store_state)(const T* panels, bool v_first, int k_dim, int v_dim, int p_begin, int p_end, const Rows& dst);
  void (*products)(const ChunkTiles<T>& chunk, bool with_q);
  // (F0)-(F3), (F6). g: log decay of the rows, not floored yet (nullptr: no gate); beta activated; scale of pg; pg nullptr: not
  // wanted. a_form: abar <- A of (F2), the ungated inverse with beta on the rows, in place of (F3).
  void (*head_tiles)(const ChunkTiles<T>& chunk, const T* g, const T* beta, T scale, bool a_form, const HeadTiles<T>& out);
  void (*walk)(const Walk<T>& w, int p_begin, int p_end);
  void (*reverse)(const Reverse<T>& r, int p_begin, int p_end);
  void (*grads)(const Grads<T>& g);
  int64_t (*grads_scratch)(int k_dim, int v_dim);
  // (C1), (C3): out = m state + add, all panels; transposed: m^T. m is a transition as its walk leaves it.
  void (*merge)(const T* m, bool transposed, const T* state, const T* add, int k_dim, int v_dim, T* out);
  double (*fma_rate)(int64_t rounds);  // runs rounds * 2 * lanes * 12 * 64 FLOP of independent FMAs and returns the FLOP done
};

struct Level {
  const char* name;        // "x86-64-v3"
  const char* force_name;  // "cpu-v3"
  const KernelTable<float>* f32;
  const KernelTable<double>* f64;
};

}  // namespace qla::cpu
