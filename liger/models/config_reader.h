#pragma once
#include <algorithm>
#include <sstream>
#include <string>
#include "liger/models/config.h"
#include "liger/models/json.h"

namespace liger {

/// Fields of one use; several names stand apart by spaces.
struct ConfigFields {
  FieldUse use;
  const char* names;
  const char* allowed = "[]";
};

template <size_t n>
std::map<std::string, ConfigField> by_name(const ConfigFields (&all)[n]) {
  std::map<std::string, ConfigField> found;
  for (const auto& [use, names, allowed] : all) {
    std::istringstream words(names);
    for (std::string name; words >> name;) found[name] = {use, allowed};
  }
  return found;
}

/// Reads a JSON file of fields that a table knows; its errors name the file and the field.
struct ConfigReader {
  using json = nlohmann::json;
  const json& content;
  const std::string& path;
  const std::map<std::string, ConfigField>& fields;

  template <class... Why>
  void check(bool holds, const Why&... why) const {
    TORCH_CHECK(holds, path, ": ", why...);
  }

  /// Reads a field that is there and not null; says whether it was.
  template <class T>
  bool read(const json& from, const char* name, T& into) const {
    if (!from.contains(name) || from[name].is_null()) return false;
    try {
      into = from[name].get<T>();
    } catch (const json::exception& error) { check(false, name, ": ", error.what()); }
    return true;
  }
  template <class T>
  bool read(const char* name, T& into) const {
    TORCH_INTERNAL_ASSERT(fields.contains(name) && fields.at(name).use == FieldUse::Read, name,
                          " is not in the table as read");
    return read(content, name, into);
  }
  /// As transformers: what is missing has the default, and null says none.
  void read_or_none(const char* name, int64_t& into, int64_t missing, int64_t none) const {
    into = content.contains(name) ? none : missing;
    read(name, into);
  }
  template <class T>
  void need(const json& from, const char* name, T& into) const {
    check(read(from, name, into), "there is no ", name);
  }
  template <class T>
  void need(const char* name, T& into) const {
    check(read(name, into), "there is no ", name);
  }

  template <class Table, class T>
  bool choose(const char* name, const Table& table, T& into) const {
    std::string given;
    if (!read(name, given)) return false;
    for (const auto& [known, value] : table)
      if (given == known) {
        into = value;
        return true;
      }
    check(false, "unknown ", name, " ", given);
    return false;
  }

  /// Of the fields that the table refuses those that have another value than it allows.
  void refuse_unknown() const {
    for (const auto& [name, field] : fields) {
      if (field.use != FieldUse::Refused || !content.contains(name) || content[name].is_null()) continue;
      const json allowed = json::parse(field.allowed), &given = content[name];
      check(std::find(allowed.begin(), allowed.end(), given) != allowed.end(), name, " ", given.dump(),
            " is not known");
    }
  }
};

}  // namespace liger
