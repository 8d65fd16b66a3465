#pragma once
#include <torch/nn/module.h>
#include <ostream>
#include <string>
#include "liger/ops.h"

/// What the modules have in common: how they hand over what they may lack, and print their options as torch's modules
/// do.
namespace liger::nn {

inline std::optional<at::Tensor> given(const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; }

inline const char* name(Casting c) { return c == Casting::Llama ? "Llama" : c == Casting::Gemma ? "Gemma" : "None"; }

inline const char* name(Gate g) { return g == Gate::SiLU ? "SiLU" : "Sigmoid"; }

inline const char* name(RouterScore s) {
  return s == RouterScore::Softmax ? "Softmax" : s == RouterScore::Sigmoid ? "Sigmoid" : "SqrtSoftplus";
}

inline const char* name(Activation a) {
  switch (a) {
#define LIGER_CASE(formula, name) \
  case Activation::formula: return #formula;
    LIGER_ACTIVATIONS(LIGER_CASE)
#undef LIGER_CASE
  }
  return "?";
}

inline const char* name(Reduction r) {
  switch (r) {
    case Reduction::None: return "None";
    case Reduction::Mean: return "Mean";
    case Reduction::Sum: return "Sum";
    case Reduction::BatchMean: return "BatchMean";
  }
  return "?";
}

inline const char* name(Distillation d) {
  switch (d) {
    case Distillation::ForwardKL: return "ForwardKL";
    case Distillation::ReverseKL: return "ReverseKL";
    case Distillation::JensenShannon: return "JensenShannon";
    case Distillation::TotalVariation: return "TotalVariation";
    case Distillation::Cosine: return "Cosine";
  }
  return "?";
}

inline void print_value(std::ostream& to, bool b) { to << (b ? "true" : "false"); }
inline void print_value(std::ostream& to, int64_t i) { to << i; }
inline void print_value(std::ostream& to, double d) { to << d; }
inline void print_value(std::ostream& to, const std::string& s) { to << s; }
inline void print_value(std::ostream& to, const at::Tensor& t) { t.defined() ? to << t.sizes() : to << "none"; }
template <class T>
  requires std::is_enum_v<T>
void print_value(std::ostream& to, T value) {
  to << name(value);
}

inline void print_options(std::ostream&, const char*) {}

template <class T, class... More>
void print_options(std::ostream& to, const char* between, const char* option, const T& value, const More&... more) {
  to << between << option << "=";
  print_value(to, value);
  print_options(to, ", ", more...);
}

/// liger::nn::RMSNorm(hidden_size=16, eps=1e-06): the module's type and pairs of an option's name and value.
template <class... Options>
void print(std::ostream& to, const torch::nn::Module& module, const Options&... options) {
  std::string type = module.name();
  if (type.ends_with("Impl")) type.resize(type.size() - 4);
  to << type << "(";
  print_options(to, "", options...);
  to << ")";
}

}  // namespace liger::nn
