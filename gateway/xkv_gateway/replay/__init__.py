"""The main job on real input: a trace of block hashes, played against a running gateway as a connector would."""
