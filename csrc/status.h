// Errors are values inside the core; bindings.cc turns them into Python exceptions.
#pragma once

#include <string.h>

#include <string>
#include <utility>

namespace zg {

enum class Code {
  ok,
  invalid,      // the caller broke the contract of a function           -> ValueError
  system,       // a system call failed; `error` is its errno            -> OSError
  connect,      // a peer's memory cannot be opened                      -> ConnectError
  mismatch,     // ranks do not run the same sequence of operations      -> MismatchError
  peer,         // a peer died, aborted or closed                        -> PeerError
  timeout,      // nothing arrived in time                               -> TimeoutError
  internal,     // something that no caller causes by an argument        -> RuntimeError
  interrupted,  // a Python signal handler raised                        -> that exception
};

struct [[nodiscard]] Status {
  Code code = Code::ok;
  int error = 0;     // errno, for system and connect
  std::string text;  // what failed, with numbers; then a blank line and `hint:`
  std::string path;  // the file, for system and connect

  bool ok() const { return code == Code::ok; }
};

inline Status fail(Code code, std::string text, int error = 0, std::string path = {}) {
  return Status{code, error, std::move(text), std::move(path)};
}

// A system call's failure: what could not be done, the errno's text, and what to do next.
inline Status failed(const std::string& what, int error, const std::string& path, const std::string& hint = {}) {
  return fail(Code::system, what + ": " + strerror(error) + (hint.empty() ? "" : "\n\nhint: " + hint), error, path);
}

#define ZG_TRY(expression)                       \
  do {                                           \
    ::zg::Status zg_status = (expression);       \
    if (!zg_status.ok()) return zg_status;       \
  } while (0)

}  // namespace zg
