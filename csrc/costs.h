// What work costs on one engine. Formulas and symbols: docs/pricing.md.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace calrouter {

/// One engine's constants: seconds, tokens, bytes.
struct Costs {
  double prefill_base_s = 0.0;
  double prefill_per_token_s = 0.0;
  double prefill_per_token_sq_s = 0.0;
  double decode_base_s = 0.0;
  double decode_per_seq_s = 0.0;
  double decode_per_context_token_s = 0.0;
  double transfer_base_s = 0.0;
  double transfer_bytes_per_s = 0.0;
  std::int64_t kv_bytes_per_token = 0;
  std::int64_t kv_capacity_tokens = 0;
  // Of a KV cache that comes from an engine on another host.
  double far_transfer_base_s = 0.0;
  double far_transfer_bytes_per_s = 0.0;

  /// c(P): seconds to prefill a prompt of which `tokens` are not cached.
  double prefill_s(double tokens) const {
    return prefill_base_s + prefill_per_token_s * tokens +
           prefill_per_token_sq_s * tokens * tokens;
  }

  /// s(n, C): seconds of one decode step of `sequences` with `context_tokens` of KV.
  double step_s(double sequences, double context_tokens) const {
    return decode_base_s + decode_per_seq_s * sequences +
           decode_per_context_token_s * context_tokens;
  }

  /// Throws std::invalid_argument naming the first constant that cannot be.
  void check() const {
    require_not_negative("prefill_base_s", prefill_base_s);
    require_not_negative("prefill_per_token_s", prefill_per_token_s);
    require_not_negative("prefill_per_token_sq_s", prefill_per_token_sq_s);
    require_not_negative("decode_base_s", decode_base_s);
    require_not_negative("decode_per_seq_s", decode_per_seq_s);
    require_not_negative("decode_per_context_token_s", decode_per_context_token_s);
    require_not_negative("transfer_base_s", transfer_base_s);
    require_positive("transfer_bytes_per_s", transfer_bytes_per_s);
    require_not_negative("kv_bytes_per_token",
                         static_cast<double>(kv_bytes_per_token));
    require_positive("kv_capacity_tokens", static_cast<double>(kv_capacity_tokens));
    require_not_negative("far_transfer_base_s", far_transfer_base_s);
    require_positive("far_transfer_bytes_per_s", far_transfer_bytes_per_s);
    require_positive("the prefill of one token", prefill_s(1.0));
    require_positive("the decode step of one sequence", step_s(1.0, 1.0));
  }

 private:
  // `!(x >= 0)` and not `x < 0`: a NaN is refused as well.
  static void require_not_negative(const char* name, double value) {
    if (!(value >= 0.0) || std::isinf(value))
      throw std::invalid_argument(std::string(name) + " must be finite and at least 0");
  }
  static void require_positive(const char* name, double value) {
    if (!(value > 0.0) || std::isinf(value))
      throw std::invalid_argument(std::string(name) + " must be finite and above 0");
  }
};

/// One engine's scheduler limits, by vLLM's names. The defaults are those of vLLM's
/// own scheduler configuration.
struct Limits {
  std::int64_t max_num_seqs = 128;
  std::int64_t max_num_batched_tokens = 2048;

  void check() const {
    if (max_num_seqs < 1)
      throw std::invalid_argument("max_num_seqs must be at least 1");
    if (max_num_batched_tokens < 1)
      throw std::invalid_argument("max_num_batched_tokens must be at least 1");
  }
};

}  // namespace calrouter
