#pragma once
#include "liger/core/kernel.h"

namespace liger {

/// The gated delta rule (Yang et al. 2024, arXiv:2412.06464). For each document and head, token by token, with a state
/// S [K, V] that begins at 0 or at a given one:
///   S  ← eᵍ S
///   D  = v − Sᵀ k̂
///   S  ← S + k̂ (β D)ᵀ
///   o  = s Sᵀ q̂
/// where x̂ = x / √(Σ x² + eps) with the norm of q and k, and x without. Head h reads key head h / (heads / key_heads).
/// Without `delta` it is gated linear attention, with D = v; U and Y are 0, as is what K and R make of S. It may have a
/// skip connection, a number of each head:
///   o  = s Sᵀ q̂ + skip v
/// Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) is its case
///   q = C
///   k = B
///   β = dt
///   g = dt A
///
/// In chunks of C tokens of one document, with S the state before a chunk, G the sum of g from the chunk's first token
/// on and
///   E_ij = e^(G_i − G_j)
///   A_ij = (k̂_i · k̂_j) E_ij          for i > j, else 0
///   P_ij = s (q̂_i · k̂_j) E_ij        for i >= j, else 0
///   U    = (I + A β)⁻¹ A               strictly lower
/// the same is
///   X  = V − e^G K̂ S
///   D  = X − U (β X)
///   O  = s e^G Q̂ S + P (β D)
///   S' = e^(G_C) S + (e^(G_C − G) K̂)ᵀ (β D)
/// No exponent is above 0, and the diagonal of (I + A β)⁻¹, which is 1, enters no product.
///
/// The channel_ kernels have a gate for each channel of k, as Kimi delta attention (Kimi Team 2025, arXiv:2510.26692):
///   S  ← diag(eᵍ) S
/// so that G and the decays have an index d of channels more, e^G and e^(G_C − G) multiply q̂, k̂ and S by channel, and
///   A_ij = Σ_d k̂_id k̂_jd E_ijd
///   P_ij = s Σ_d q̂_id k̂_jd E_ijd
struct GatedDeltaRule {
  const void *q, *k, *v;   // [rows, tokens, key_heads, K], the same, [rows, tokens, heads, V]
  int64_t q_row, q_token;  // elements from one row of q to the next, and from one token to the next
  int64_t k_row, k_token;  // those of k
  int64_t v_row, v_token;  // those of v
  const float *g, *beta;   // [rows, tokens, heads]; g of channel_ kernels [rows, tokens, heads, K]
  const int32_t* starts;   // [rows, tokens]: the first token, in its row, of each token's document; null: one per row
  const float* state;      // [documents, heads, K, V], what each begins with; null: 0
  const float* skip;       // [heads], without delta and with gates of heads; null: 0
  int64_t rows, tokens, key_heads, heads, K, V;
  int64_t documents;  // that have a state; more of them begin with 0, and their last one is left out
  float scale, eps;   // eps < 0: q and k as they are
  bool delta;
  bool batch_invariant;  // a document has the bits that it has alone
  DType dtype;           // of q, k and v
  void* workspace;       // as many bytes as gated_delta_rule_workspace says
};

struct GatedDeltaRuleForward : GatedDeltaRule {
  void* o;             // [rows, tokens, heads, V], in dtype
  float* final_state;  // [documents, heads, K, V]; null where not wanted
};

/// With dO = s times the gradient of O, and dS' that of S', a chunk's are
///   dN = Pᵀ dO / s + (e^(G_C − G) K̂) dS'          P / s: P without s, for dO has it
///   R  = dN − Uᵀ (β dN)
///   dV = β R
///   dβ = R · D
///   dS = e^(G_C) dS' + (e^G Q̂)ᵀ dO − (β e^G K̂)ᵀ R
///   W_ij = (dO_i · D_j) β_j E_ij                    for i >= j
///   Y_ij = −(R_i · D_j) β_i β_j E_ij                for i > j
///   dQ̂ = W K̂ + e^G (dO Sᵀ)
///   dK̂ = Wᵀ Q̂ + (Y + Yᵀ) K̂ + e^(G_C − G) β (D dS'ᵀ) − e^G β (R Sᵀ)
///   dG_i = Σ_(j<i) Z_ij − Σ_(j>i) Z_ji + e^G q̂_i·(dO Sᵀ)_i − c_i − β e^G k̂_i·(R Sᵀ)_i
///   Z  = W ⊙ (Q̂ K̂ᵀ) + Y ⊙ (K̂ K̂ᵀ)
///   c_i = e^(G_C − G_i) β_i k̂_i·(D dS'ᵀ)_i
/// and dG of the last token has Σ c + e^(G_C) ⟨S, dS'⟩ more; dg is the sum of dG from a token to the end of its chunk.
/// dq and dk are sums over the heads of a key head, of which the norm's derivative is taken once. A skip connection
/// adds skip dO / s to dV, and its gradient is the sum over tokens of
///   dskip = dO · v / s
///
/// With a gate for each channel, W and Y are without E, which is of channels, and
///   dQ̂_id = Σ_j W_ij k̂_jd E_ijd + e^G (dO Sᵀ)
///   dK̂_id = Σ_j Y_ij k̂_jd E_ijd + Σ_j (W_ji q̂_jd + Y_ji k̂_jd) E_jid + …
///   dG_id = q̂_id dQ̂_id − k̂_id dK̂_id + 2 k̂_id (Σ_j Y_ij k̂_jd E_ijd − e^G β (R Sᵀ))
/// where sums over j leave out i = j: a token's own key does not decay. dG of the last token has Σ_i c_id + e^(G_Cd)
/// Σ_v S_dv dS'_dv more.
struct GatedDeltaRuleBackward : GatedDeltaRule {
  const void* dout;            // [rows, tokens, heads, V], in dtype; begins at a multiple of 16 bytes
  const float* dfinal;         // [documents, heads, K, V]; null: 0
  void *dq, *dk, *dv;          // [rows, tokens, heads of q, k or v, their width], contiguous, in dtype
  float *dg, *dbeta, *dstate;  // as g, beta and state; dstate is null where there is no state, or not wanted
  float* dskip;                // [rows, tokens, heads]: each token's part; null where there is no skip
};

inline constinit Kernel<GatedDeltaRuleForward> gated_delta_rule_forward{"gated_delta_rule_forward"};
inline constinit Kernel<GatedDeltaRuleBackward> gated_delta_rule_backward{"gated_delta_rule_backward"};

/// How many bytes of workspace one of the two kernels needs.
struct GatedDeltaRuleWorkspace {
  const GatedDeltaRule& like;
  bool backward;
  int64_t* bytes;
};
inline constinit Kernel<GatedDeltaRuleWorkspace> gated_delta_rule_workspace{"gated_delta_rule_workspace"};

inline constinit Kernel<GatedDeltaRuleForward> channel_delta_rule_forward{"channel_delta_rule_forward"};
inline constinit Kernel<GatedDeltaRuleBackward> channel_delta_rule_backward{"channel_delta_rule_backward"};
inline constinit Kernel<GatedDeltaRuleWorkspace> channel_delta_rule_workspace{"channel_delta_rule_workspace"};

}  // namespace liger
