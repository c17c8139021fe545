"""Implements secure aggregation: the server learns the sum of the sites' replies (a secure sum), and nothing about a
single reply.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
figure 4, in the variant against an active server. `shamir` shares secrets, `crypto` has the primitives, `protocol` has the
steps of a site, `client` keeps their states on the site's disk, and `unmask` is the server's part. `protocol` and `unmask`
are functions of explicit states; nothing here sends anything.

Two exchanges of the paper are one here. The paper's sites sign the list of survivors (round 3), the server shows them each
other's signatures, and they release shares (round 4), so that nothing is released before t sites have seen the same list.
Here a site releases its shares at once, but encrypted with a key that only t sites that got the same list can recover
together. Each site w shares, beside its two secrets, random numbers a and d_v, one for each site v, by the same secret
sharing. The key for the list L is F_w(L) = a + Σ_{v ∈ L} d_v. A site that got L releases its share of F_w(L), which it
computes from its shares of a and d_v, since the sharing is linear.

Claim: with n sites, c of which reveal all that they know to the server, and 2t > n + c (the paper's condition, theorem 6.5),
whatever lists the server sends, F_w(L) of an honest site w stays uniform unless the honest sites that got L and the c
colluding ones are at least t.
Proof: the server knows of dealer w values of the polynomials a(x), d_v(x) of degree t − 1: all of them at the c points,
and one sum a(x_h) + Σ_{v ∈ L_h} d_v(x_h) at the point of each honest h. Let some combination of these, with the coefficient
k_h for h, give a(0) + Σ_{v ∈ L} d_v(0). Let e(x) = (1, x, …, x^(t−1)); at t distinct points these are independent. Comparing
the coefficients of a gives Σ_h k_h e(x_h) + (terms at the c points) = e(0). Comparing those of d_v gives the same sum over
those h whose list has v, which is e(0) if v ∈ L and 0 if not. So for each v the sum over those h whose lists differ from L
in v, with terms at the c points, is 0. If these h are at most t − c, it follows that k_h = 0 for all of them. If they are
more, then the other h, whose terms give e(0), are at least t − c, and there are at least 2t − 2c + 1 > n − c honest sites,
a contradiction. So k_h ≠ 0 only where L_h = L, and e(0) is a combination of at least t points. ∎
(`tests/deploy/secure_aggregation/test_secure_masking.py` counts ranks.)

Since an honest site releases its shares once, the server can open at most one list. For each site it then knows either
shares of the self-mask, or shares of the key, never both.
"""
