#include "liger/models/llama.h"

#include <torch/torch.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <numbers>
#include <set>

namespace liger::nn {
namespace {

using at::Tensor;

constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kIgnored = "rotary_emb.inv_freq";  // what transformers ignores too, in any layer

/// The weights of a checkpoint, by the model's names, and what it calls them. That of a Qwen3.5 that sees images has
/// its model for text within another, and weights beside it, as one has that predicts several tokens.
std::map<std::string, std::string> names_in(const Checkpoint& checkpoint, const LlamaConfig& config) {
  constexpr std::string_view inner = "model.language_model.";
  std::map<std::string, std::string> found;
  for (const std::string& name : checkpoint.names()) {
    const bool nested = config.hybrid() && name.starts_with(inner);
    if (config.hybrid() && (name.starts_with("mtp.") || name.starts_with("model.visual."))) continue;
    const std::string own = nested ? "model." + name.substr(inner.size()) : name;
    TORCH_CHECK(found.emplace(own, name).second, "the checkpoint has ", own, " and ", name);
  }
  return found;
}

/// The state of the generator that dropouts on a device draw from.
Tensor random_state(at::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}
void set_random_state(at::Device device, const Tensor& state) {
  if (!state.defined()) return;
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

using LinearLayers = std::vector<std::pair<std::string, std::shared_ptr<ProjectionImpl>>>;

/// The linear layers of the blocks, by name.
LinearLayers linear_layers(const LlamaModel& model) {
  LinearLayers found;
  for (const auto& item : model->layers->named_modules("model.layers"))
    if (auto layer = std::dynamic_pointer_cast<ProjectionImpl>(item.value())) found.emplace_back(item.key(), layer);
  return found;
}

/// Those that target_modules names. Raises c10::Error for a name of none of them.
LinearLayers targets_of(const LlamaModel& model, const LoraConfig& lora) {
  const auto& targets = lora.target_modules;
  TORCH_CHECK(!targets.empty(), "target_modules is empty");
  LinearLayers layers = linear_layers(model);
  const auto names = [](const std::string& target, const std::string& layer) {
    return layer == target || layer.ends_with("." + target);
  };
  for (const std::string& target : targets)
    TORCH_CHECK(
        std::any_of(layers.begin(), layers.end(), [&](const auto& layer) { return names(target, layer.first); }),
        "target_modules: ", target, " is no linear layer of a block");
  std::erase_if(layers, [&](const auto& layer) {
    return std::none_of(targets.begin(), targets.end(), [&](const auto& target) { return names(target, layer.first); });
  });
  return layers;
}

bool is_adapter(const std::string& parameter) {
  return parameter.ends_with(".lora_A") || parameter.ends_with(".lora_B");
}

std::string adapter_file(const std::string& folder) {
  return (std::filesystem::path(folder) / "adapter_model.safetensors").string();
}

/// What adapter_file calls a parameter.
std::string name_in_file(const std::string& parameter) { return "base_model.model." + parameter + ".weight"; }

/// A layer whose activations are recomputed in backward: only its input waits for that.
struct Checkpointed : torch::autograd::Function<Checkpointed> {
  using Layer = std::function<Tensor(const Tensor&)>;
  struct Held : torch::CustomClassHolder {
    Held(Layer layer, Tensor random) : layer(std::move(layer)), random(std::move(random)) {}
    Layer layer;
    Tensor random;  // the state of the generator before the layer drew its masks; undefined where it draws none
  };

  /// `trains` makes the result need a gradient, also where x, of frozen layers, needs none.
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& /*trains*/,
                        const c10::intrusive_ptr<Held>& held) {
    ctx->save_for_backward({x});
    ctx->saved_data["layer"] = held;
    at::AutoDispatchBelowAutograd below;
    return held->layer(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    const auto held = ctx->saved_data["layer"].toCustomClass<Held>();
    const Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_(ctx->needs_input_grad(0));
    const at::AutoGradMode with_gradients(true);
    const Tensor after = held->random.defined() ? random_state(x.device()) : Tensor();
    set_random_state(x.device(), held->random);
    const Tensor y = held->layer(x);
    set_random_state(x.device(), after);
    y.backward(gradients[0]);
    return {x.grad(), Tensor(), Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(liger, m) { m.class_<Checkpointed::Held>("_CheckpointedLayer"); }

}  // namespace

std::pair<Tensor, double> rope_frequencies(const LlamaConfig& c) {
  const RopeScaling& r = c.rope_scaling;
  const int64_t width = c.rotary_width();
  const Tensor plain = torch::pow(c.rope_theta, torch::arange(0, width, 2, torch::kFloat) / double(width)).reciprocal();
  if (r.type == "linear") return {plain / r.factor, 1};
  if (r.type == "llama3") {
    const double longest = r.original_max_position_embeddings / r.low_freq_factor,
                 shortest = r.original_max_position_embeddings / r.high_freq_factor;
    const Tensor wave = 2 * std::numbers::pi / plain;
    const Tensor smooth =
        (r.original_max_position_embeddings / wave - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
    return {torch::where(wave > longest, plain / r.factor,
                         torch::where(wave < shortest, plain, (1 - smooth) * plain / r.factor + smooth * plain)),
            1};
  }
  if (r.type == "yarn") {
    const auto scale = [](double factor, double by) { return factor <= 1 ? 1 : 0.1 * by * std::log(factor) + 1; };
    const double attention = r.attention_factor != 0 ? r.attention_factor
                             : r.mscale != 0 && r.mscale_all_dim != 0
                                 ? scale(r.factor, r.mscale) / scale(r.factor, r.mscale_all_dim)
                                 : scale(r.factor, 1);
    const auto column = [&](double turns) {
      return width * std::log(r.original_max_position_embeddings / (turns * 2 * std::numbers::pi)) /
             (2 * std::log(c.rope_theta));
    };
    double low = column(r.beta_fast), high = column(r.beta_slow);
    if (r.truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.), high = std::min(high, double(width - 1));
    if (low == high) high += 0.001;
    const Tensor stretched = ((torch::arange(width / 2, torch::kFloat) - low) / (high - low)).clamp(0, 1);
    return {plain / r.factor * stretched + plain * (1 - stretched), attention};
  }
  return {plain, 1};
}

LlamaForCausalLMImpl::LlamaForCausalLMImpl(LlamaConfig of, bool draw) : config(std::move(of)) {
  reset();
  if (!draw) return;
  const torch::NoGradGuard no_gradients;
  for (const auto& item : named_parameters()) {
    if (item.key().ends_with(".bias")) item.value().zero_();
    else if (item.value().dim() > 1) item.value().normal_(0, config.initializer_range);
  }
  if (config.pad_token_id >= 0) model->embed_tokens->weight[config.pad_token_id].zero_();
}

std::shared_ptr<torch::nn::Module> LlamaForCausalLMImpl::clone(const std::optional<at::Device>& device) const {
  const auto copy = Cloneable::clone(device);
  const auto parameters = named_parameters();
  for (auto& item : copy->named_parameters())  // what reset() has made needs them, but for adapted layers
    item.value().requires_grad_(parameters[item.key()].requires_grad());
  return copy;
}

void LlamaForCausalLMImpl::reset() {
  model = register_module("model", LlamaModel(config));
  if (!config.tie_word_embeddings)
    lm_head = register_module("lm_head", Projection(config.hidden_size, config.vocab_size, false));
  std::tie(inv_freq_, attention_factor_) = rope_frequencies(config);
}

std::shared_ptr<LlamaForCausalLMImpl> LlamaForCausalLMImpl::from_pretrained(const std::string& folder,
                                                                            std::optional<at::ScalarType> dtype) {
  LlamaConfig config = LlamaConfig::load(folder);
  config.dtype = dtype.value_or(config.dtype);
  const Checkpoint checkpoint(folder);
  const auto names = names_in(checkpoint, config);
  const bool has_head = names.contains(kHead), has_embedding = names.contains(kEmbedding);
  const auto loaded = [&](const char* name) { return checkpoint.tensor(names.at(name)).to(config.dtype); };
  if (config.tie_word_embeddings && has_head && has_embedding && !loaded(kHead).equal(loaded(kEmbedding))) {
    TORCH_WARN(folder, ": config.json says tie_word_embeddings, but the checkpoint's ", kHead, " differs from its ",
               kEmbedding, ": they are not tied");
    config.tie_word_embeddings = false;
  }
  const auto made = std::make_shared<LlamaForCausalLMImpl>(config, false);
  const auto parameters = made->named_parameters();
  for (const auto& [own, name] : names)
    TORCH_CHECK(name.find(kIgnored) != std::string::npos || (config.tie_word_embeddings && name == kHead) ||
                    parameters.contains(own),
                folder, ": the checkpoint has a weight that the model lacks, ", name);
  for (const auto& item : parameters) {
    // Of two that are tied, the checkpoint may hold either.
    const bool is_head = config.tie_word_embeddings && item.key() == kEmbedding && has_head && !has_embedding;
    const auto found = names.find(is_head ? kHead : item.key());
    TORCH_CHECK(found != names.end(), folder, ": the checkpoint has no ", item.key());
    const std::string& name = found->second;
    const Tensor weight = checkpoint.tensor(name);
    TORCH_CHECK(weight.sizes() == item.value().sizes(), folder, ": ", name, " is of shape ", weight.sizes(),
                ", and the model's of ", item.value().sizes());
    TORCH_CHECK(weight.is_floating_point(), folder, ": ", name, " is of ", weight.scalar_type());
    item.value().set_data(weight.to(config.dtype));
  }
  return made;
}

void LlamaForCausalLMImpl::save_pretrained(const std::string& folder, int64_t max_shard_bytes) const {
  LlamaConfig saved = config;
  saved.dtype = model->embed_tokens->weight.scalar_type();
  saved.save(folder);
  NamedTensors tensors;
  std::map<std::string, Tensor> merged;
  for (const auto& [name, layer] : linear_layers(model))
    if (layer->options.rank() > 0) merged[name + ".weight"] = layer->merged_weight();
  for (const auto& item : named_parameters()) {
    if (is_adapter(item.key())) continue;
    const auto found = merged.find(item.key());
    tensors.emplace_back(item.key(), found == merged.end() ? item.value() : found->second);
  }
  save_checkpoint(folder, tensors, max_shard_bytes);
}

void LlamaForCausalLMImpl::add_adapter(const LoraConfig& added) {
  TORCH_CHECK(!lora, "the model has adapters already");
  const LinearLayers targets = targets_of(model, added);
  for (Tensor& parameter : parameters()) parameter.requires_grad_(false);
  for (const auto& [name, layer] : targets) layer->adapt(added);
  lora = added;
}

void LlamaForCausalLMImpl::quantise(EightBit format) {
  bool any = false;
  for (const auto& [name, layer] : linear_layers(model)) {
    const int64_t out = layer->options.out_features(), in = layer->options.in_features();
    if (out >= 128 && out % 16 == 0 && in % 16 == 0) layer->quantise(format), any = true;
  }
  TORCH_CHECK(any, "no linear layer has 128 rows or more, and sizes that are multiples of 16");
}

void LlamaForCausalLMImpl::load_adapter(const std::string& folder) {
  const LoraConfig added = LoraConfig::load(folder);
  const std::string path = adapter_file(folder);
  const SafetensorsFile file(path);
  std::map<std::string, Tensor> values;  // all are checked before the model changes
  const auto read = [&](const std::string& parameter, int64_t rows, int64_t columns) {
    const std::string name = name_in_file(parameter);
    const std::array shape{rows, columns};
    const Tensor value = file.tensor(name);
    TORCH_CHECK(value.sizes() == shape && value.is_floating_point(), path, ": ", name, " is of ", value.scalar_type(),
                value.sizes(), ", and the model's of shape ", at::IntArrayRef(shape));
    values[name] = value;
  };
  for (const auto& [name, layer] : targets_of(model, added)) {
    read(name + ".lora_A", added.rank, layer->options.in_features());
    read(name + ".lora_B", layer->options.out_features(), added.rank);
  }
  for (const std::string& name : file.names())
    TORCH_CHECK(values.contains(name), path, ": ", name, " is of no layer that target_modules names");
  add_adapter(added);
  const torch::NoGradGuard no_gradients;
  for (auto& item : named_parameters())
    if (is_adapter(item.key())) item.value().copy_(values.at(name_in_file(item.key())));
}

void LlamaForCausalLMImpl::save_adapter(const std::string& folder) const {
  TORCH_CHECK(lora, "the model has no adapter");
  lora->save(folder);
  NamedTensors tensors;
  for (const auto& item : named_parameters())
    if (is_adapter(item.key())) tensors.emplace_back(name_in_file(item.key()), item.value());
  save_safetensors(adapter_file(folder), tensors);
}

Positions LlamaForCausalLMImpl::positions_of(const Tensor& ids, const CausalLMInputs& in) {
  const int64_t tokens = ids.size(1), before = in.cache ? in.cache->length : 0, keys = before + tokens;
  const auto longs = ids.options().dtype(at::kLong);
  const Tensor ordinary = at::arange(before, keys, longs).unsqueeze(0);
  const Tensor positions = in.position_ids.defined() ? in.position_ids.to(at::kLong) : ordinary;
  inv_freq_ = inv_freq_.to(ids.device());  // once
  const Tensor half = positions.to(at::kFloat).unsqueeze(-1) * inv_freq_, angles = at::cat({half, half}, -1);
  Positions p{angles.cos() * attention_factor_, angles.sin() * attention_factor_, {}, {}, {}};
  const bool packed = in.position_ids.defined() && before == 0 && tokens > 1 &&
                      (in.packed ? *in.packed : at::diff(positions).ne(1).any().item<bool>());
  const bool windowed = config.sliding_window > 0 && keys > config.sliding_window;
  if (!in.attention_mask.defined() && !packed && !windowed && (before == 0 || tokens == 1)) return p;
  const Tensor row = ordinary.unsqueeze(-1), column = at::arange(keys, longs);  // places, not positions
  Tensor mask = column.le(row);
  if (windowed) mask = mask.logical_and(column.gt(row - config.sliding_window));
  if (packed) {
    // Where in its row each token's document begins, which is no other document's.
    const Tensor begins = at::constant_pad_nd(at::diff(positions).ne(1), {1, 0}, true);
    const Tensor starts = std::get<0>((ordinary * begins).cummax(1));
    mask = mask.logical_and(starts.unsqueeze(2).eq(starts.unsqueeze(1)));
    if (config.hybrid() && !(in.cache && in.attention_mask.defined()))  // then they are those of padding
      p.starts = starts.to(at::kInt).expand({ids.size(0), tokens}).contiguous();
  }
  if (in.attention_mask.defined()) {
    TORCH_CHECK(in.attention_mask.sizes() == at::IntArrayRef({ids.size(0), keys}), "attention_mask must be [",
                ids.size(0), ", ", keys, "], got ", in.attention_mask.sizes());
    mask = mask.logical_and(in.attention_mask.ne(0).unsqueeze(1));
    mask = mask.logical_or(column.eq(row));  // a padding token sees itself: no softmax of nothing
    if (config.hybrid()) p.kept = in.attention_mask.slice(1, before).ne(0).unsqueeze(-1);
  }
  p.mask = mask.unsqueeze(1);
  return p;
}

Tensor LlamaForCausalLMImpl::hidden_states(const Tensor& ids, const CausalLMInputs& in) {
  TORCH_CHECK(ids.dim() == 2, "ids must be [batch, tokens], got ", ids.sizes());
  const Positions positions = positions_of(ids, in);
  Tensor x = liger::embedding(model->embed_tokens->weight, ids, config.pad_token_id);
  const bool draws = lora && lora->dropout > 0;
  const bool again = gradient_checkpointing && is_training() && torch::GradMode::is_enabled() && !in.cache;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const auto layer = model->layers->ptr<LlamaDecoderLayerImpl>(i);
    if (again) {
      const Tensor trains = x.requires_grad() ? Tensor(x) : at::empty({0}, x.options()).requires_grad_();
      x = Checkpointed::apply(x, trains,
                              c10::make_intrusive<Checkpointed::Held>(
                                  [layer, positions](const Tensor& y) { return layer->forward(y, positions); },
                                  draws ? random_state(x.device()) : Tensor()));
    } else {
      x = layer->forward(x, positions, in.cache, i);
    }
  }
  if (in.cache) in.cache->length += ids.size(1);
  return model->norm(x);
}

CausalLMOutput LlamaForCausalLMImpl::forward(const Tensor& ids, const CausalLMInputs& in) {
  const Tensor hidden = hidden_states(ids, in);
  if (!in.labels.defined()) return {{}, at::linear(hidden, head_weight())};
  TORCH_CHECK(in.labels.sizes() == ids.sizes(), "labels must be of ids' shape ", ids.sizes(), ", got ",
              in.labels.sizes());
  const Tensor shifted = at::constant_pad_nd(in.labels.slice(1, 1), {0, 1}, -100);
  HeadOptions options;
  std::optional<Tensor> divisor;
  if (in.divisor.defined()) divisor = in.divisor;
  else if (in.num_items) divisor = at::full({}, *in.num_items, hidden.options().dtype(at::kFloat));
  if (divisor) options.reduction = Reduction::Sum;
  return {
      fused_linear_cross_entropy(hidden.flatten(0, 1), head_weight(), shifted.flatten(), options, {}, {}, divisor).loss,
      {}};
}

Tensor LlamaForCausalLMImpl::generate(const Tensor& ids, const GenerateOptions& o, Tensor mask) {
  TORCH_CHECK_VALUE(o.temperature() >= 0 && o.top_p() > 0 && o.top_p() <= 1,
                    "temperature must not be negative and top_p be in (0, 1]");
  TORCH_CHECK(!mask.defined() || mask.sizes() == ids.sizes(), "attention_mask must be of ids' shape ", ids.sizes(),
              ", got ", mask.defined() ? mask.sizes() : at::IntArrayRef());
  TORCH_CHECK_VALUE(!mask.defined() || mask.select(1, -1).ne(0).all().item<bool>(),
                    "attention_mask: rows must be padded on the left, or the next token has nothing before it");
  const torch::NoGradGuard no_gradients;
  KVCache cache{.capacity = ids.size(1) + o.max_new_tokens()};
  const auto ends = [&](const Tensor& token) {
    Tensor found = at::zeros_like(token, token.options().dtype(at::kBool));
    for (const int64_t eos : config.eos_token_ids) found.logical_or_(token.eq(eos));
    return found;
  };
  Tensor all = ids, next = ids, ended = at::zeros({ids.size(0), 1}, ids.options().dtype(at::kBool));
  for (int64_t i = 0; i < o.max_new_tokens(); ++i) {
    CausalLMInputs inputs{.attention_mask = mask, .cache = &cache};
    if (mask.defined()) inputs.position_ids = (mask.ne(0).cumsum(1) - 1).clamp_min(0).slice(1, -next.size(1));
    const Tensor hidden = hidden_states(next, inputs).slice(1, -1).squeeze(1);
    const Tensor logits = at::linear(hidden, head_weight()).to(at::kFloat);
    if (o.temperature() == 0) {
      next = logits.argmax(-1, true);
    } else {
      auto [p, order] = at::softmax(logits / o.temperature(), -1).sort(-1, true);
      p = p.masked_fill(p.cumsum(-1) - p >= o.top_p(), 0);  // the first one that reaches top_p is among them
      next = order.gather(-1, at::multinomial(p, 1, false, o.generator()));
    }
    if (!config.eos_token_ids.empty())
      next = at::where(ended, at::scalar_tensor(config.eos_token_ids[0], ids.options()), next);
    all = at::cat({all, next}, 1);
    if (mask.defined()) mask = at::constant_pad_nd(mask, {0, 1}, 1);
    ended = ended.logical_or(ends(next));
    if (!config.eos_token_ids.empty() && ended.all().item<bool>()) break;
  }
  return all;
}

void LlamaForCausalLMImpl::pretty_print(std::ostream& to) const {
  print(to, *this, "model_type", config.model_type, "vocab_size", config.vocab_size, "hidden_size", config.hidden_size,
        "num_hidden_layers", config.num_hidden_layers, "tie_word_embeddings", config.tie_word_embeddings);
}

}  // namespace liger::nn
