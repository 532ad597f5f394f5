"""How far a number may be from what it is held against, and why. Integers and bytes have no line here: they are equal."""

# An argmin may take any centroid whose distance exceeds the smallest by at most this share: FP32 distances of 256
# channels are sums of 256 roundings, about 1e-6 relative, and implementations add in different orders.
NEAR_TIE = 1e-5

# Distances are expanded into products of what stands in the frame of the mean centroid. Between centroids that lie closer
# together than they lie to the mean, a distance is a small difference of these products: a few roundings of them remain.
EXPANDED_DISTANCE = 32 * 2.0**-24

# A residual is a difference of BF16 numbers and is quantized by one FP32 division and one multiplication: the bound in
# steps may be passed by a few roundings, relative to the numbers involved.
FP32_ROUNDING = 4 * 2.0**-24

# Half a step, unless the value clips.
HALF_STEP = 0.5

# A scale may be rounded down by 2**-4 of itself (half a unit in the last of E4M3's three mantissa bits, from 1.0625 to 1),
# so a group spans up to 3 * 1.0625 = 3.1875 steps; the zero-point takes up to half a step of that from either end.
ALWAYS = 0.6875

# The projection of what PSAC leaves behind repeats a matrix inverse and two products of FP32.
PSAC_PROJECTION = 1e-3

# A second moment is a sum of up to a few hundred products in FP32, here against FP64.
MOMENT = 2e-6

# Attention is two products and a softmax in FP32, here against FP64; logits of up to 30 are exponentiated.
ATTENTION = 2e-5

# A Lloyd round cannot increase the objective; rounding of FP32 means and assignments at near ties can, by this share.
OBJECTIVE = 1e-5

# A centroid is a mean in FP32 stored in BF16: half a unit in the last of 8 bits.
BF16_ROUNDING = 2.0**-9

# Published ratios and increments have two to four digits.
RATIO = 0.005
INCREMENT = 0.00005

# A correction by PSAC is a sum of a few products; where another order of adding moves it across the middle between two
# BF16 numbers, a key changes by one of its last bits. Sums differ by 2**-24 of themselves, the middles are 2**-8 apart.
GOLDEN_SHARE = 0.001
