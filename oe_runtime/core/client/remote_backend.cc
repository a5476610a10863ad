#include "oe_runtime/core/client/backend.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {

std::unique_ptr<Backend> NewRemoteBackend(const RemoteOptions&) { throw Error("not built yet"); }

}  // namespace oe
