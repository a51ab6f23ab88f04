// Opening a folder that a user names, so that nobody else decides where that is.
//
// The path is looked up once, name by name, and all that follows goes by the descriptor (openat): what becomes of the
// names later does not matter. A symbolic link among the parents is followed where root or this user owns it: a /scratch
// or /tmp that is a link is commonplace, and its owner needs no link to do harm. A link of anybody else is refused, as
// its owner could send offloaded tensors elsewhere; so is the folder itself being a link, whoever owns it.
#pragma once

#include <string>

#include "memory.h"
#include "status.h"

namespace zg {

// ELOOP where a link is refused; else the errno of the look-up. The path of the error is `folder`.
Status open_folder(const std::string& folder, FileDescriptor& out);

}  // namespace zg
