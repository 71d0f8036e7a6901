"""The vLLM connector: vLLM keeps its KV cache on the card, through the gateway, for every cache group.

`fusionx_connector` is what vLLM loads. The modules that decide (`settings`, `fingerprint`, `keys`, `groups`, `matching`,
`requests`, `planning`) are pure and import neither torch nor vLLM.
"""
