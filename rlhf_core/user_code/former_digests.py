"""Keep the digests of functions of ours whose modules moved without another change, so that results keep their keys."""

FORMER_DIGESTS = {
    # rlhf_core.data.worlds.arithmetic
    "1403539307fd85c880b9215cd16315168d8113be1c19c5a2e0a4703cbe0676e6": "2f22273ffaba6ad94bee584cbe6bbee8d7375365d91bb5e57651332b9381234b",
    # rlhf_core.data.worlds.mixed
    "6e7c4ffd58386f4433701adc0238960b91360a0b7e019607a8c49f6ea77b1db9": "f35a719e30c1631451f7cc363d2065576ba619941ca10a8885b8c2f45401332b",
    # rlhf_core.data.worlds.support
    "2c6e7ee3e62c80bdf66bf79071e91e5fb759c47ad19e8b142679949a197f271c": "76f7d3bfe4d48fe39f44cd1b377fa89402893c23b4019199b5eaa82c338862fa",
    # rlhf_core.data.worlds.support_readers
    "3c1ef2e9364770414367caac53f1703b7efb221c0597ccf409911132fa392315": "8f96713256ee82eeb597a19d6c21b9960f6b65666d3a094b8beba35c5524c9eb",
}
"""Digest of a module's code now -> its digest under the former name. A module that changes further gets a new digest."""
