#include "liger/models/tokenizer_files.h"

#include <algorithm>
#include <filesystem>
#include "liger/models/config_reader.h"

namespace liger {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;
using enum FieldUse;

/// The special tokens that have a name, in the order in which new ones get their ids.
constexpr const char* kNamed[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};

constexpr ConfigFields kTokenizerFields[] = {
    {Read,
     "tokenizer_class bos_token eos_token unk_token sep_token pad_token cls_token mask_token extra_special_tokens "
     "additional_special_tokens model_specific_special_tokens added_tokens_decoder add_prefix_space "
     "split_special_tokens chat_template"},
    {Refused, "padding_side truncation_side", R"(["left", "right"])"},
    {Refused, "fix_mistral_regex trust_remote_code", "[false]"},
    {Refused, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "[false]"},
    {Refused, "init_inputs", "[[]]"},
    {Refused,
     "auto_map fast_tokenizer_files tokenizer_object tokenizer_padding tokenizer_truncation post_processor gguf_file "
     "_json_padding _json_truncation"},
    // A tokenizer.json says this: transformers takes its vocabulary, its merges and its post_processor.
    {Harmless, "add_bos_token add_eos_token vocab merges vocab_file merges_file tokenizer_file unk_id"},
    // Of decoding, padding, truncation and warnings, which a caller asks for.
    {Harmless,
     "clean_up_tokenization_spaces errors model_max_length max_len max_length stride truncation_strategy "
     "pad_to_multiple_of pad_token_type_id model_input_names verbose"},
    // Names, and what other programs or templates read.
    {Harmless,
     "name_or_path processor_class backend files_loaded is_local local_files_only _commit_hash response_template "
     "response_schema chat_control_tokens token tokenizer _spm_precompiled_charsmap"},
    // Of classes whose code is not used here.
    {Harmless, "legacy use_default_system_prompt sp_model_kwargs spaces_between_special_tokens trim_offsets"},
};

/// Classes of transformers 5 that take vocabulary, merges and post_processor from tokenizer.json, and have the rest
/// themselves.
struct Class {
  const char* name;
  std::vector<const char*> end_of_text;  // named tokens that are this where tokenizer_config.json has no such field
  json normalizer;
  const char* words;  // a pattern; null: GPT-2's
  bool adds_again;    // special tokens, without what else is said of them
};
constexpr const char* kEndOfText = "<|endoftext|>";
const std::vector<Class>& classes() {
  static const std::vector<Class> all = {
      {"Qwen2Tokenizer",
       {"unk_token", "eos_token", "pad_token"},
       {{"type", "NFC"}},
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
       R"(\s*[\r\n]+|\s+(?!\S)|\s+)",
       true},
      {"Qwen3_5Tokenizer",
       {"unk_token", "eos_token", "pad_token"},
       {{"type", "NFC"}},
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|)"
       R"(\s*[\r\n]+|\s+(?!\S)|\s+)",
       false},
      {"GPT2Tokenizer", {"bos_token", "eos_token", "unk_token"}, nullptr, nullptr, false},
  };
  return all;
}

/// Those that take tokenizer.json as it is.
constexpr const char* kPlain[] = {"TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"};

bool is_one_of(const auto& name, const auto& names) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

/// Python's truth.
bool truth(const json& value) {
  return !value.is_null() && value != false && value != 0 && value != "" && !(value.is_structured() && value.empty());
}

/// A file's object, with its fields in the file's order; an empty one where there is no file.
ordered_json read_ordered(const fs::path& path) {
  return fs::exists(path) ? read_json<ordered_json>(path.string()) : ordered_json::object();
}

std::vector<std::pair<int64_t, AddedToken>> added_of(const json& file) {
  std::vector<std::pair<int64_t, AddedToken>> tokens;
  if (file.contains("added_tokens"))
    for (const json& token : file["added_tokens"]) tokens.emplace_back(token.at("id"), AddedToken::of(token));
  return tokens;
}

/// transformers.PreTrainedTokenizerBase._from_pretrained and what it calls, for a tokenizer.json.
class Folder {
 public:
  explicit Folder(const std::string& folder) : folder_(folder), path_((folder_ / "tokenizer_config.json").string()) {
    files_.tokenizer = read_json((folder_ / "tokenizer.json").string());
    fields_ = read_ordered(path_);
    const json content = fields_;
    const ConfigReader in{content, path_, TokenizerFiles::config_fields()};
    in.refuse_unknown();
    in.read("split_special_tokens", files_.split_special_tokens), in.read("add_prefix_space", prefix_space_);
    files_.has_chat_template = content.contains("chat_template") && !content["chat_template"].is_null();
    files_.has_chat_template = files_.has_chat_template || fs::exists(folder_ / "chat_template.jinja") ||
                               fs::exists(folder_ / "additional_chat_templates");
    choose_class();
  }

  TokenizerFiles read() {
    const auto in_file = added_of(files_.tokenizer);
    if (class_) rebuild();
    files_.added.emplace_back();
    for (const auto& [id, token] : in_file)
      if (!class_) files_.added[0].push_back(token);
    rename_additional();
    collect_specific();
    if (fields_.contains("added_tokens_decoder")) {
      read_decoder();
    } else {
      merge_special_tokens_map();
      read_added_tokens();
      for (const auto& [id, token] : in_file) decode(id, token);
    }
    name_tokens();
    collect();
    if (class_ && class_->adds_again) add_again();
    return std::move(files_);
  }

 private:
  template <class... Why>
  void check(bool holds, const Why&... why) const {
    TORCH_CHECK(holds, path_, ": ", why...);
  }

  /// As AutoTokenizer: some families have a class of their own, and a Llama's with a byte-level file is any.
  void choose_class() {
    const fs::path config_path = folder_ / "config.json";
    const json config = fs::exists(config_path) ? read_json(config_path.string()) : json::object();
    const auto text = [](const auto& from, const char* name) {
      return from.contains(name) && from[name].is_string() ? from[name].template get<std::string>() : std::string();
    };
    const std::string type = text(config, "model_type");
    std::string name = text(fields_, "tokenizer_class"), from = path_;
    if (name.empty()) name = text(config, "tokenizer_class"), from = config_path.string();
    if (name.ends_with("Fast")) name.resize(name.size() - 4);
    if (type == "qwen2" || (type == "qwen3" && name.empty())) name = "Qwen2Tokenizer";
    if (type == "qwen3_5" || (type == "qwen3_5_text" && name.empty())) name = "Qwen3_5Tokenizer";
    if (name.empty() || name == "LlamaTokenizer" || is_one_of(name, kPlain)) return;
    if (type == "mistral" && name != "MistralCommonBackend") return;
    for (const Class& known : classes())
      if (name == known.name) class_ = &known;
    TORCH_CHECK(class_, from, ": tokenizer_class ", name, " is not known");
  }

  void rebuild() {
    json& file = files_.tokenizer;
    json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", prefix_space_}, {"use_regex", !class_->words}};
    json cut = bytes;
    if (class_->words)
      cut = {
          {"type", "Sequence"},
          {"pretokenizers",
           {{{"type", "Split"}, {"pattern", {{"Regex", class_->words}}}, {"behavior", "Isolated"}, {"invert", false}},
            bytes}}};
    for (const auto& [name, value] : {std::pair("normalizer", class_->normalizer), std::pair("pre_tokenizer", cut)}) {
      json before = file.value(name, json());
      plain(before);
      if (before != value) {
        TORCH_WARN((folder_ / "tokenizer.json").string(), ": as in transformers 5, ", class_->name,
                   " (of tokenizer_class or of the model's type) has another ", name, ", which is taken");
      }
      file[name] = value;
    }
    file["decoder"] = {{"type", "ByteLevel"}};
    json model = {{"type", "BPE"}};
    for (const char* name : {"vocab", "merges"})
      if (file["model"].contains(name)) model[name] = std::move(file["model"][name]);
    file["model"] = std::move(model);
  }

  /// Without what changes no ids, and with a default.
  static void plain(json& step) {
    if (step.is_object()) step.erase("trim_offsets");
    if (step.is_object() && step.value("type", "") == "ByteLevel" && !step.contains("use_regex"))
      step["use_regex"] = true;
    if (step.is_structured())
      for (json& inner : step) plain(inner);
  }

  void rename_additional() {
    if (!fields_.contains("additional_special_tokens")) return;
    if (fields_.contains("extra_special_tokens") && truth(fields_["extra_special_tokens"])) return;
    if (truth(fields_["additional_special_tokens"])) extra_ = "additional_special_tokens";
    fields_["extra_special_tokens"] = ordered_json(fields_["additional_special_tokens"]);
    fields_.erase("additional_special_tokens");
  }

  /// Special tokens with other names.
  void collect_specific() {
    std::vector<std::string> names;
    for (const auto& [name, value] : fields_.items())
      if (name.ends_with("_token") && !is_one_of(name, kNamed) && value.is_string()) names.push_back(name);
    ordered_json specific = ordered_json::object();
    for (const std::string& name : names) specific[name] = fields_[name], fields_.erase(name);
    if (fields_.contains("extra_special_tokens") && fields_["extra_special_tokens"].is_object()) {
      for (const auto& [name, value] : fields_["extra_special_tokens"].items())
        specific[name] = value, source_[name] = path_ + ": " + extra_;
      fields_.erase("extra_special_tokens");
    }
    if (!specific.empty()) fields_["model_specific_special_tokens"] = specific;
  }

  void decode(int64_t id, const AddedToken& token) { decoder_[id] = token, by_content_[token.content] = token; }

  void read_decoder() {
    const ordered_json& decoder = fields_["added_tokens_decoder"];
    check(decoder.is_object(), "added_tokens_decoder is no object");
    for (const auto& [key, value] : decoder.items()) {
      char* end = nullptr;
      const int64_t id = std::strtoll(key.c_str(), &end, 10);
      check(!key.empty() && *end == 0 && value.is_object(), "added_tokens_decoder: ", key, " is no token's id");
      decode(id, token_of(value, "added_tokens_decoder"));
    }
  }

  /// Of older versions of transformers: its fields have precedence.
  void merge_special_tokens_map() {
    const fs::path path = folder_ / "special_tokens_map.json";
    const ordered_json map = read_ordered(path);
    for (const auto& [name, value] : map.items()) {
      const bool extra = name == "extra_special_tokens";
      const bool token = name.ends_with("_token") && (value.is_string() || value.is_object());
      TORCH_CHECK(token || is_one_of(name, kNamed) || extra || name == "additional_special_tokens", path.string(), ": ",
                  name, " ", value.dump(), " is not known");
      const auto special = [&](ordered_json one) {
        one["special"] = true, one["__type"] = "AddedToken";
        return one;
      };
      source_[name] = path.string();
      if (value.is_object() && !extra) {
        TORCH_CHECK(token, path.string(), ": ", name, " is no list of tokens");
        fields_[name] = special(value);
      } else if (value.is_array() && extra) {
        ordered_json all = ordered_json::array();
        if (fields_.contains(name) && fields_[name].is_array()) all = fields_[name];
        for (const ordered_json& given : value) {
          const ordered_json one = given.is_object() ? special(given) : given;
          if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
        }
        fields_[name] = all;
      } else {
        fields_[name] = value;
      }
      if (extra && value.is_object()) {
        ordered_json& specific = fields_["model_specific_special_tokens"];
        if (specific.is_null()) specific = ordered_json::object();
        specific.update(value);
        fields_.erase(name);
      }
    }
  }

  /// Of slow tokenizers of older versions.
  void read_added_tokens() {
    const fs::path path = folder_ / "added_tokens.json";
    std::unordered_set<std::string> special;
    const auto note = [&](const ordered_json& token) {
      if (token.is_string()) special.insert(token.get<std::string>());
      if (token.is_object()) special.insert(token.value("content", ""));
    };
    for (const char* name : kNamed)
      if (fields_.contains(name)) note(fields_[name]);
    if (fields_.contains("extra_special_tokens"))
      for (const ordered_json& token : fields_["extra_special_tokens"]) note(token);
    const ordered_json added = read_ordered(path);
    for (const auto& [content, id] : added.items()) {
      TORCH_CHECK(id.is_number_integer(), path.string(), ": ", content, " has the id ", id.dump());
      const bool is_special = special.contains(content);
      decode(id.get<int64_t>(), {content, false, false, false, is_special, !is_special});
    }
  }

  AddedToken token_of(const json& value, const std::string& name) const {
    if (value.is_string()) return {value.get<std::string>(), false, false, false, /*special=*/true};
    try {
      return AddedToken::of(value);
    } catch (const json::exception& error) { check(false, name, ": ", error.what()); }
    return {};
  }

  /// A string or a saved AddedToken; nothing where it is null.
  std::optional<AddedToken> named(const std::string& name, const ordered_json& value) const {
    if (value.is_null()) return std::nullopt;
    const auto source = source_.find(name);
    TORCH_CHECK(value.is_string() || (value.is_object() && value.value("__type", "") == "AddedToken"),
                source == source_.end() ? path_ : source->second, ": ", name, " ", value.dump(),
                " is neither a string nor an AddedToken");
    return token_of(value, name);
  }

  /// Special tokens in the order of transformers: named ones, those with other names, and those without.
  void name_tokens() {
    const json& padding = files_.tokenizer.value("padding", json());
    for (const char* name : kNamed) {
      std::optional<AddedToken> token;
      if (fields_.contains(name)) {
        token = named(name, fields_[name]);
        if (token)
          if (const auto found = by_content_.find(token->content); found != by_content_.end()) token = found->second;
      } else if (class_) {
        if (is_one_of(name, class_->end_of_text)) token = token_of(kEndOfText, name);
      } else if (name == std::string("pad_token") && padding.is_object() && padding.contains("pad_token")) {
        token = token_of(padding["pad_token"], "padding.pad_token");
      }
      if (token && name == std::string("eos_token")) files_.eos_token = token->content;
      if (token) named_.push_back(*token);
    }
    std::vector<std::pair<std::string, AddedToken>> specific;
    const auto add = [&](const std::string& name, const ordered_json& value) {
      const auto token = named(name, value);
      check(token.has_value(), name, " is null");
      const auto place = std::find_if(specific.begin(), specific.end(), [&](const auto& s) { return s.first == name; });
      if (place == specific.end()) specific.emplace_back(name, *token);
      else place->second = *token;
    };
    for (const auto& [name, value] : fields_.items())
      if (name.ends_with("_token") && !is_one_of(name, kNamed) && (value.is_string() || value.is_object()))
        add(name, value);
    if (fields_.contains("model_specific_special_tokens") && !fields_["model_specific_special_tokens"].is_null()) {
      const ordered_json& given = fields_["model_specific_special_tokens"];
      check(given.is_object(), "model_specific_special_tokens is no object");
      for (const auto& [name, value] : given.items()) add(name, value);
    }
    for (const auto& [name, token] : specific) named_.push_back(token);
    const char* list = fields_.contains("extra_special_tokens") ? "extra_special_tokens" : "additional_special_tokens";
    if (!fields_.contains(list) || fields_[list].is_null()) return;
    const std::string said = fields_.contains("extra_special_tokens") ? extra_ : list;
    check(fields_[list].is_array(), said, " is no list of tokens");
    for (const ordered_json& value : fields_[list]) {
      const auto token = named(said, value);
      check(token.has_value(), said, " has null");
      unnamed_.push_back(*token);
    }
  }

  /// What transformers.TokenizersBackend.__init__ adds: what is not in tokenizer.json, or is another there.
  void collect() {
    std::map<std::string, AddedToken> there;
    for (const AddedToken& token : files_.added.front()) there[token.content] = token;
    std::vector<AddedToken> tokens;
    for (const auto& [id, token] : decoder_)
      if (const auto same = there.find(token.content); same == there.end() || !(same->second == token))
        tokens.push_back(token);
    for (const AddedToken& token : tokens) there[token.content] = token;
    for (const auto* more : {&named_, &unnamed_})
      for (const AddedToken& token : *more)
        if (!there.contains(token.content) && !is_one_of(token, tokens)) tokens.push_back(token);
    for (AddedToken& token : tokens)
      token.special = token.special || std::any_of(named_.begin(), named_.end(), [&](const AddedToken& named) {
                        return named.content == token.content;
                      });
    files_.added.push_back(std::move(tokens));
  }

  void add_again() {
    std::vector<AddedToken> tokens;
    for (const auto* more : {&named_, &unnamed_})
      for (const AddedToken& token : *more) tokens.push_back({token.content, false, false, false, /*special=*/true});
    files_.added.push_back(std::move(tokens));
  }

  fs::path folder_;
  std::string path_;                           // of tokenizer_config.json
  std::map<std::string, std::string> source_;  // of fields that another file has
  TokenizerFiles files_;
  ordered_json fields_;                         // of tokenizer_config.json, and what other files add to them
  std::string extra_ = "extra_special_tokens";  // what the file calls them
  const Class* class_ = nullptr;
  bool prefix_space_ = false;
  std::map<int64_t, AddedToken> decoder_;
  std::map<std::string, AddedToken> by_content_;
  std::vector<AddedToken> named_, unnamed_;
};

}  // namespace

const std::map<std::string, ConfigField>& TokenizerFiles::config_fields() {
  static const auto all = by_name(kTokenizerFields);
  return all;
}

TokenizerFiles TokenizerFiles::of_file(const std::string& path) {
  TokenizerFiles files;
  files.tokenizer = read_json(path);
  try {
    files.added.emplace_back();
    for (const auto& [id, token] : added_of(files.tokenizer)) files.added[0].push_back(token);
  } catch (const json::exception& error) { TORCH_CHECK(false, path, ": added_tokens: ", error.what()); }
  return files;
}

TokenizerFiles TokenizerFiles::of_folder(const std::string& folder) {
  try {
    return Folder(folder).read();
  } catch (const json::exception& error) { TORCH_CHECK(false, folder, ": the tokenizer's files: ", error.what()); }
}

}  // namespace liger
