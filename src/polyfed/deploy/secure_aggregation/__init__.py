"""Secure sums: the server learns the sum of what sites send, and nothing of one site alone.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
figure 4, in the form against an active server. `shamir` shares secrets, `keys` has the primitives, `masking` is what a
site does, `opening` what the server does. All are functions of explicit states; nothing here sends anything.

Two exchanges of the paper are one here. The paper's sites sign the list of survivors (round 3), the server shows them each
other's signatures, and they hand out shares (round 4), so that nothing is handed out before t sites were told the same list.
Here a site hands out its shares at once, but encrypted with a key that only t sites who were told the same list open
together. Each site w deals, beside its two secrets, random numbers a and d_v, one for each site v, by the same secret
sharing. The key for the list L is F_w(L) = a + Σ_{v ∈ L} d_v. A site that was told L hands out its share of F_w(L), which it
computes from its shares of a and d_v, since the sharing is linear.

Claim: with n sites, c of which tell the server all they know, and 2t > n + c (the paper's condition, theorem 6.5), whatever
lists the server tells, F_w(L) of an honest site w stays uniform unless honest sites that were told L, and the c, are t.
Proof: what the server knows of dealer w are values of polynomials a(x), d_v(x) of degree t − 1: all of them at the c points,
and one sum a(x_h) + Σ_{v ∈ L_h} d_v(x_h) at the point of each honest h. Let some combination of these, with the coefficient
k_h for h, give a(0) + Σ_{v ∈ L} d_v(0). Let e(x) = (1, x, …, x^(t−1)); at t distinct points these are independent. Comparing
coefficients of a gives Σ_h k_h e(x_h) + (terms at the c points) = e(0), of d_v the same sum over those h that were told v,
which is e(0) if v ∈ L and 0 if not. So for each v the sum over those h whose lists differ from L in v, with terms at the c
points, is 0. Are these h at most t − c, it follows that k_h = 0 for all of them. Are they more, then the other h, whose
terms give e(0), are at least t − c, and there are at least 2t − 2c + 1 > n − c honest sites, which cannot be. So k_h ≠ 0
only where L_h = L, and e(0) is a combination of at least t points. ∎ (`tests/deploy/secure_aggregation/test_secure_masking.py` counts ranks.)

Since an honest site hands out once, at most one list can be opened. Of each site then either shares of its self-mask
are known to the server, or shares of its key, never both.
"""
