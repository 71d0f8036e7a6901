"""Request/reply protocols: the control protocol and its transports."""

from xkv_rpc.client import AsyncClient, Client, LoadResult, Region
from xkv_rpc.curve_files import read_client_keys
from xkv_rpc.errors import ErrorCode, GatewayUnavailableError, RpcError, XkvRpcError
from xkv_rpc.messages import Limits, LoadStatus, LookupMode, StoreStatus, scope_of
from xkv_rpc.session import ClientOptions

__all__ = [
    "AsyncClient",
    "Client",
    "ClientOptions",
    "ErrorCode",
    "GatewayUnavailableError",
    "Limits",
    "LoadResult",
    "LoadStatus",
    "LookupMode",
    "Region",
    "RpcError",
    "StoreStatus",
    "XkvRpcError",
    "read_client_keys",
    "scope_of",
]
