"""Keep the former digests of our functions whose modules moved or are hashed differently: results keep their keys."""

FORMER_DIGESTS = {
    # rlhf_contrib.sandbox.code
    "bdcb6a58caeb32279c11203e60438edf173bb50e1f0c040cd2420315d5c58cde": "04c3c2029e959385a3e46acef8a521ebc768ae56fe37a87e4f271d2aee047a13",
    # rlhf_contrib.worlds.arithmetic
    "5c0d9850fda50747fbdc0ea8c53db8f54f0b7a018b2c4c1fb4923d4ad0d03306": "2f22273ffaba6ad94bee584cbe6bbee8d7375365d91bb5e57651332b9381234b",
    # rlhf_contrib.worlds.mixed
    "3f56d2e7138286191c1e7e3d2764e3d70ae457f5969bd32c490f141a8bcf8ecc": "f35a719e30c1631451f7cc363d2065576ba619941ca10a8885b8c2f45401332b",
    # rlhf_contrib.worlds.support
    "fa65c19c0f83653da1c14f4dfd0e2280948559e8fe1713294e74feb6efb2754d": "76f7d3bfe4d48fe39f44cd1b377fa89402893c23b4019199b5eaa82c338862fa",
    # rlhf_contrib.worlds.support_readers
    "50bb4a9031a8c2f9073fe968a729af6ce9a7094284fcaef3dd3d7ca08fb74bcb": "8f96713256ee82eeb597a19d6c21b9960f6b65666d3a094b8beba35c5524c9eb",
    # rlhf_core.rewards.library.instructions
    "bb4c053ad657cad9faf02fe515053fdda1f8ee1e7c3ac15c328def51cb589dac": "222a45e03a6739e05af5331cb0810307429f9cb47ac730d5f8a9f34effe4611a",
    # rlhf_core.rewards.library.math
    "514e14fc95780d744ed9489c799dda5644b790ae62467808606d464aa7bc8d2d": "0e8a5832d8057cf5ba84c6f9d751a39af05629ec9c134ec2af4233317ce35a51",
    # rlhf_core.rewards.library.reasoning_gym
    "0dd99f0667d764754e02cd33cf1d4e3c3913776e16894e35825d9e074fde3450": "8a981912ade8527c9e292ff312d1e83304a08b26ed5b2814dc372fe32c1c32cd",
    # rlhf_core.rewards.library.structure
    "ddc55cba9b1d1ae25f23dc4ac1e6eddb4941acb1a2e55cae4c8f67c03136dfc1": "8c77b0ac9344600af87c3b3b56e89eb07fd3b6b0a87e5b504b4433932b01a390",
    # rlhf_core.rewards.library.text
    "df3d0aaff8dc1e99d72b2bb3fe39f8a9b27a07db91614359e1c737dd5cab4950": "cec520f3b672cb1947536048fb2484d8ac781861f1e584ec3cb66cc0ff6bc277",
    # rlhf_core.rewards.verifiable
    "75fdccd2df42e0cb3d4fbeeb8d6d1f8b5e1e238342faabf6dfe2dfcb5853ffda": "8ce79c227c3ea60068585cbc5c58e04f452c7f11499b082894d8994089ad3d20",
}
"""Digest of a module's code now -> its digest under its former name, when docstrings and messages counted, too. A module whose
code changes further gets a new digest; its entry then goes."""
