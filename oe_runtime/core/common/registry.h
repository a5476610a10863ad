// Things of one kind that register themselves by name while the program starts: a file that is added is known
// without being named anywhere. Their objects must be linked as such (CMakeLists.txt: oe_registered).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <string>
#include <utility>

namespace oe {

// Entry has a `name`.
template <typename Entry>
class Registry {
 public:
  // A constant of this type in an unnamed namespace registers an entry. A name that comes twice ends the
  // program as it starts.
  struct Add {
    explicit Add(Entry entry) noexcept {
      const std::string name = entry.name;
      if (Entries().emplace(name, std::move(entry)).second) return;
      std::fprintf(stderr, "'%s' is registered twice\n", name.c_str());
      std::abort();
    }
  };

  // By name; nullptr for one that is not registered.
  static const Entry* Find(const std::string& name) {
    const auto found = Entries().find(name);
    return found == Entries().end() ? nullptr : &found->second;
  }

  static const std::map<std::string, Entry>& All() { return Entries(); }

  // "a, b or c" with `last` = " or ".
  static std::string Names(const std::string& last) {
    std::string names;
    for (auto it = Entries().begin(); it != Entries().end(); ++it) {
      if (!names.empty()) names += std::next(it) == Entries().end() ? last : ", ";
      names += it->first;
    }
    return names;
  }

 private:
  // A function's, since files register in any order.
  static std::map<std::string, Entry>& Entries() {
    static std::map<std::string, Entry> entries;
    return entries;
  }
};

}  // namespace oe
