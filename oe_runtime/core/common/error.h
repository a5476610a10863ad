#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

// Every error of the core says what was found, where, and what to do; the text is shown to users as it is.
namespace oe {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A table, optimizer, initializer or storage description (or an argument) that cannot be used.
class SpecError : public Error {
 public:
  using Error::Error;
};

// A key of an array table that is not in [0, input_dim).
class KeyRangeError : public Error {
 public:
  using Error::Error;
};

// A gradient with NaN or infinity for a table that refuses them.
class GradientError : public Error {
 public:
  using Error::Error;
};

// Memory, a directory or a pool file that cannot be had; error_number() is errno, or 0 without one.
class StorageError : public Error {
 public:
  explicit StorageError(const std::string& what, int error_number = 0)
      : Error(error_number == 0 ? what : what + ": " + std::strerror(error_number)),
        error_number_(error_number) {}
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

// No room for a row: in the storage, or beside what a pool keeps free for its rows (storage/slot_store.h).
class StorageFull : public StorageError {
 public:
  using StorageError::StorageError;
};

// A table file that cannot be written, read or trusted.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace oe
