// The SDK of jsctrl: the module "aici", and its functions in the global scope.  docs/AICI-CONTROLLERS.md describes it.
//
// The program waits for one operation at a time (`operation`): text to append, gen, fork or waitVars.  The callbacks of
// the runtime carry it out, and its promise then lets the program go on to the next one:
//
//   pre    appends text, forks, waits       mid    masks, splices       post    learns which tokens there are
(function (host) {
  "use strict"

  const MAX_TEXTS_IN_PRE = 8 // the runtime allows ten rounds; after these, text goes through mid
  const MAX_FORCED = 64
  const RAN_TOO_LONG =
    "the program made more than a million jumps and calls without $, gen, fork or waitVars: is there an endless loop?"
  const NO_REQUIRE = 'modules are those of the language: import { gen } from "aici", or from "./file.js" that is given with the program'
  const NO_CLOCK = "there is no clock; to wait for other forks, use waitVars"
  const NO_NETWORK = "there is no network; give the program its data as text"
  const NO_NODE = "this is neither a browser nor Node.js; there are only the functions of jsctrl and those of the language"
  const MISSING = {
    ...{ require: NO_REQUIRE, module: NO_REQUIRE, exports: NO_REQUIRE },
    ...{ setTimeout: NO_CLOCK, setInterval: NO_CLOCK, setImmediate: NO_CLOCK, performance: NO_CLOCK },
    ...{ fetch: NO_NETWORK, XMLHttpRequest: NO_NETWORK, WebSocket: NO_NETWORK },
    ...{ process: NO_NODE, Buffer: NO_NODE, window: NO_NODE, document: NO_NODE, Deno: NO_NODE, Bun: NO_NODE },
  }
  const ONLY_FILE = "program.js"
  const GEN_OPTIONS = ["regex", "schema", "choice", "options", "maxTokens", "stopAt", "stopTokens", "storeVar"]

  let main = null
  let isRunning = false
  let isEnded = false
  let prompt = []
  let tokens = [] // of the sequence, as the engine has them
  let surplus = 0 // how many of the last tokens are to be removed, by the next splice
  let surplusIsEnd = false // ... which is only an end token
  let operation = null
  let sent = null // the splice of the last mid
  let textsInPre = 0

  // ---- Operations

  class Stop {}

  function begin(name, fields) {
    if (isEnded) throw new Stop()
    if (!isRunning) throw new Error(`${name} works only inside the function that is given to start()`)
    if (operation) throw new Error(`${name} was called before ${operation.name} had finished: put await before ${operation.name}`)
    return new Promise((resolve) => {
      operation = { name, resolve, ...fields }
    })
  }

  function finish(value) {
    const done = operation
    operation = null
    done.resolve(value)
  }

  function append(rest) {
    const appended = begin("$", { rest })
    if (!rest.length) finish()
    return appended
  }

  function $(strings, ...values) {
    if (!Array.isArray(strings)) return fixed(strings)
    if (strings.raw) return append(host.tokenize(strings.reduce((text, string, i) => text + String(values[i - 1]) + string)))
    if (!strings.every(Number.isInteger)) throw new TypeError("$ takes a text, or a list of token ids")
    return append(strings.slice())
  }

  function fixed(text) {
    return append(tokenize(text))
  }

  function gen(options) {
    return genTokens(options).then(detokenize)
  }

  function genTokens(options = {}) {
    if (options instanceof RegExp) throw new TypeError(`gen takes an object: gen({ regex: ${options} })`)
    if (typeof options !== "object" || options === null || Array.isArray(options))
      throw new TypeError("gen takes an object: gen({ regex: /\\d/ })")
    for (const name of Object.keys(options))
      if (!GEN_OPTIONS.includes(name)) throw new TypeError(`gen has no option ${name}; it has ${GEN_OPTIONS.join(", ")}`)
    const { maxTokens = Infinity, stopAt = "", stopTokens = [], storeVar = null } = options
    if (!(maxTokens >= 1)) throw new TypeError("maxTokens is a number, at least 1")
    if (typeof stopAt !== "string") throw new TypeError("stopAt is a string")
    if (!Array.isArray(stopTokens)) throw new TypeError("stopTokens is a list of token ids")
    const wanted = constraintOf(options)
    const constraint = wanted && host.constraint(JSON.stringify(wanted))
    const fields = { constraint, maxTokens, stopAt, stopTokens, storeVar, generated: [], forced: [] }
    const ids = begin("gen", fields)
    if (constraint !== null && host.isDone(constraint)) finishGen()
    return ids
  }

  function select(choice) {
    return gen({ choice })
  }

  function fork(n) {
    if (!Number.isInteger(n) || n < 1) throw new TypeError("fork takes a whole number, at least 1")
    const index = begin("fork", { n })
    if (n === 1) finish(0)
    return index
  }

  function waitVars(...names) {
    const values = begin("waitVars", { names: names.flat() })
    checkVariables()
    return values
  }

  function checkVariables() {
    const values = operation.names.map(getVar)
    if (!values.includes(null)) finish(values)
  }

  function stop() {
    isEnded = true
    throw new Stop()
  }

  // ---- The sequence

  class Label {
    constructor() {
      if (!isRunning) throw new Error("a label works only inside the function that is given to start()")
      this.ptr = tokens.length - surplus
    }

    tokensSince() {
      return getTokens().slice(this.ptr)
    }

    textSince() {
      return detokenize(this.tokensSince())
    }

    fixedAfter(text) {
      backtrack(this)
      return fixed(text)
    }
  }

  function label() {
    return new Label()
  }

  function backtrack(to) {
    if (operation) throw new Error(`backtrack was called before ${operation.name} had finished: put await before ${operation.name}`)
    const n = tokens.length - surplus - to.ptr
    if (!(n >= 0)) throw new Error("backtrack takes a label, while the text still reaches up to there")
    surplus += n
    if (n) surplusIsEnd = false
  }

  function getTokens() {
    return tokens.slice(0, tokens.length - surplus)
  }

  function getPrompt() {
    return prompt.slice()
  }

  function eosToken() {
    return host.endToken
  }

  function tokenize(text) {
    return host.tokenize(textOf(text))
  }

  function detokenize(ids) {
    return host.detokenize(Array.from(ids))
  }

  // ---- Variables and logs

  function getVar(name) {
    return host.getVariable(String(name))
  }

  function setVar(name, value) {
    host.writeVariable(String(name), textOf(value), false)
  }

  function appendVar(name, value) {
    host.writeVariable(String(name), textOf(value), true)
  }

  function textOf(value) {
    return value instanceof Uint8Array ? host.fromBytes(value) : String(value)
  }

  function print(...values) {
    host.log(values.map(shown).join(" ") + "\n")
  }

  function shown(value) {
    if (value instanceof Error) return describe(value)
    if (typeof value !== "object" || value === null || value instanceof RegExp) return String(value)
    try {
      return JSON.stringify(value) ?? String(value)
    } catch {
      return String(value)
    }
  }

  // ---- Tests

  class AssertionError extends Error {
    name = "AssertionError"
  }

  function assert(condition, message = "assertion failed") {
    if (!condition) throw new AssertionError(message)
  }

  function checkVar(name, wanted) {
    const value = getVar(name)
    assert(value === wanted, `the variable ${name} is ${JSON.stringify(value)}, not ${JSON.stringify(wanted)}`)
  }

  function checkVars(wanted) {
    for (const [name, value] of Object.entries(wanted)) checkVar(name, value)
  }

  function test(program) {
    start(async () => {
      await program()
      print("TEST OK")
    })
  }

  // ---- Constraints

  function constraintOf({ regex, schema, choice, options }) {
    const given = Object.entries({ regex, schema, choice, options }).filter(([, value]) => value !== undefined)
    if (given.length > 1) throw new TypeError(`gen takes one of ${given.map(([name]) => name).join(" and ")}`)
    if (regex !== undefined) return { regex: regex instanceof RegExp ? regexSource(regex) : String(regex) }
    if (schema !== undefined) return { json_schema: schema }
    if (!given.length) return null
    const [[name, texts]] = given
    if (!Array.isArray(texts) || !texts.length) throw new TypeError(`${name} is a list of texts, at least one`)
    return { choice: texts.map(String) }
  }

  // What a regular expression of JavaScript is in the runtime's syntax, in which \d and \w have the digits and letters
  // of all scripts, and brackets in a class begin a class.
  function regexSource(regex) {
    const CLASSES = { "\\d": "0-9", "\\w": "A-Za-z0-9_" }
    let inClass = false
    const source = regex.source.replace(/\\u\{[^}]*\}|\\[^]|[^]/g, (part) => {
      if (part in CLASSES) return inClass ? CLASSES[part] : `[${CLASSES[part]}]`
      if (part === "\\D" || part === "\\W") return `[^${CLASSES[part.toLowerCase()]}]`
      if (part === "\\/") return "/"
      if (inClass && "[&~".includes(part)) return "\\" + part
      if (part === "[") inClass = true
      if (part === "]") inClass = false
      return part
    })
    const flags = Array.from(regex.flags).filter((flag) => flag === "i" || flag === "s").join("")
    return flags ? `(?${flags}:${source})` : source
  }

  // ---- gen

  function sample(gen) {
    if (!gen.forced.length && gen.constraint !== null) force(gen)
    if (gen.forced.length) return splice(0, gen.forced)
    if (gen.constraint === null) host.allowAll()
    else host.allow(gen.constraint)
    return { SampleWithBias: {} }
  }

  // Tokens that the constraint leaves no choice about.
  function force(gen) {
    const room = Math.min(MAX_FORCED, gen.maxTokens - gen.generated.length)
    while (gen.forced.length < room) {
      const only = host.allowedOne(gen.constraint)
      if (only < 0 || only === host.endToken) return
      gen.forced.push(only)
      host.advance(gen.constraint, only)
      if (host.isDone(gen.constraint)) return
    }
  }

  function generated(gen, ids) {
    for (const token of ids) {
      if (token === host.endToken || gen.stopTokens.includes(token)) {
        surplus = 1
        surplusIsEnd = true
        return finishGen()
      }
      if (gen.forced.length) gen.forced.shift()
      else if (gen.constraint !== null) host.advance(gen.constraint, token)
      gen.generated.push(token)
    }
    if (gen.forced.length) return
    const isDone = gen.constraint !== null && host.isDone(gen.constraint)
    if (isDone || gen.generated.length >= gen.maxTokens || reaches(gen, ids.length)) finishGen()
  }

  // Whether the last n tokens completed stopAt: a token has at least one byte.
  function reaches({ stopAt, generated }, n) {
    return stopAt !== "" && host.detokenize(generated.slice(-(3 * stopAt.length + n))).includes(stopAt)
  }

  function finishGen() {
    const { constraint, generated, storeVar } = operation
    if (constraint !== null) host.drop(constraint)
    if (storeVar !== null) setVar(storeVar, host.detokenize(generated))
    finish(generated)
  }

  // ---- Callbacks

  const atBegin = {
    prompt(argument) {
      prompt = argument.prompt
      tokens = prompt.slice()
      if (!main) throw new Error("the program does not call start(main)")
      isRunning = true
      Promise.resolve().then(main).then(end, endWith)
    },

    pre() {
      if (operation?.name === "waitVars") checkVariables()
    },

    mid({ fork_group }) {
      textsInPre = 0
      if (!operation?.isAnnounced) return
      const index = fork_group.indexOf(host.self())
      if (index < 0 || fork_group.length !== operation.n)
        throw new Error(`fork(${operation.n}) made ${fork_group.length} sequences`)
      finish(index)
    },

    post(argument) {
      const added = argument.tokens
      const removed = sent ? sent.backtrack : argument.backtrack
      const onlyMoves = sent?.onlyMoves
      sent = null
      if (removed) {
        tokens.length -= removed
        surplus = 0
      }
      for (const token of added) tokens.push(token)
      if (onlyMoves || !operation) return
      if (operation.name === "gen") generated(operation, added)
      else if (operation.rest) {
        operation.rest = operation.rest.slice(added.length)
        if (!operation.rest.length) finish()
      }
    },
  }

  const atEnd = {
    prompt() {
      return {}
    },

    pre() {
      const result = { num_forks: 1, suspend: false, ff_tokens: [] }
      if (mayEnd()) result.num_forks = 0
      else if (operation?.name === "waitVars") {
        result.suspend = true
        result.waits_for = operation.names.map(String).filter((name) => getVar(name) === null)
      }
      else if (operation?.name === "fork" && !surplus) {
        result.num_forks = operation.n
        operation.isAnnounced = true
      }
      else if (operation?.rest && !surplus && textsInPre++ < MAX_TEXTS_IN_PRE) result.ff_tokens = operation.rest
      return result
    },

    mid() {
      if (mayEnd()) return "Stop"
      if (surplus) return splice(surplus, operation?.rest ?? [])
      if (operation.name === "gen") return sample(operation)
      return splice(0, operation.rest ?? [])
    },

    post() {
      return { stop: mayEnd() }
    },
  }

  // Whether nothing is left to do: what backtrack removed is removed also if the program ends after it.
  function mayEnd() {
    return isEnded && (!surplus || surplusIsEnd)
  }

  // Every splice appends a token, so that the engine has one to compute.  If there is none to append, the last one that
  // stays is removed and appended again.
  function splice(removed, added) {
    const onlyMoves = !added.length
    if (onlyMoves) {
      removed += 1
      added = tokens.slice(tokens.length - removed).slice(0, 1)
      if (!added.length) throw new Error("there is no token yet: begin with text, or give the request a prompt")
    }
    sent = { backtrack: removed, onlyMoves }
    return { Splice: { backtrack: removed, ff_tokens: added } }
  }

  function end() {
    if (operation && !isEnded) throw new Error(`the program ended before ${operation.name} had finished: put await before ${operation.name}`)
    isEnded = true
  }

  function endWith(error) {
    if (!(error instanceof Stop)) throw error
    end()
  }

  // ---- Modules

  // Files by name.  The program is a text, or several as {"main.js": text, "lib.js": text}, of which the first one runs.
  // No text that is a JSON object with a text in it is a program of JavaScript.
  function filesOf(argument) {
    if (!argument || argument === "null") throw new Error("no program was given: controller_arg is the text of a program")
    const several = parsed(argument)
    if (typeof several !== "object" || !several || !Object.keys(several).length) return { [ONLY_FILE]: argument }
    if (Array.isArray(several) || !Object.values(several).every((text) => typeof text === "string"))
      throw new Error('controller_arg is the text of a program, or a text for each file: {"main.js": text, "lib.js": text}')
    return Object.fromEntries(Object.entries(several).map(([name, text]) => [normal(name), text]))
  }

  function parsed(json) {
    try {
      return JSON.parse(json)
    } catch {
      return undefined
    }
  }

  // A path without "." and "..", but for those ".." that lead out of the first file's folder.
  function normal(path) {
    const parts = []
    for (const part of path.split("/")) {
      if (part === ".." && parts.length && parts.at(-1) !== "..") parts.pop()
      else if (part && part !== ".") parts.push(part)
    }
    return parts.join("/")
  }

  // The module that the file `base` imports as `name`.  tsc leaves out .js.
  function resolve(base, name) {
    if (name === "aici" && base !== "aici") return name
    const path = /^\.\.?\//.test(name) ? normal(`${base}/../${name}`) : null
    const found = [path, `${path}.js`].find((each) => path !== null && Object.hasOwn(files, each))
    if (found) return found
    const what = path === null ? `there is no module "${name}"` : `no file ${path} is given with the program`
    const known = Object.keys(files).filter((each) => each !== base).map((each) => `./${each}`)
    const error = new TypeError(`${what}; a program can import ${["aici", ...known].join(", ")}`)
    const line = files[base].split("\n").findIndex((each) => each.includes(name)) + 1
    error.stack = `    at ${base}:${line}:1`
    throw error
  }

  function source(name) {
    return name === "aici" ? `export const { ${Object.keys(aici)} } = globalThis` : files[name]
  }

  // ---- Errors

  // An error as the logs show it, with the lines of the program.
  function describe(error, ranTooLong) {
    if (error instanceof Stop) return "stop() was called outside of the function that is given to start()"
    if (error === null) return "out of memory, or the program threw null"
    if (!(error instanceof Error)) return `the program threw ${shown(error)}`
    const isInterrupt = ranTooLong && error.message === "interrupted"
    const text = isInterrupt ? RAN_TOO_LONG : `${error.name}: ${unsupported(error) ?? error.message}`
    return [text, ...String(error.stack ?? "").split("\n").map(inProgram).filter(Boolean)].join("\n")
  }

  // A line of a stack, if it is one of the program.  A file that is alone has no name here.
  function inProgram(line) {
    const [, before, file, n, column] = /^(.*?)([^\s()]+):(\d+):(\d+)\)?$/.exec(line) ?? []
    if (!Object.hasOwn(files, file)) return ""
    const at = file === ONLY_FILE ? `line ${n}, column ${column}` : `${file}, line ${n}, column ${column}`
    const name = /^\s*at (.+) \($/.exec(before)?.[1]
    return name && name !== "<anonymous>" ? `    at ${name} (${at})` : `    at ${at}`
  }

  // What a program tried that there is not, and what there is instead.
  function unsupported({ name, message }) {
    const missing = MISSING[/^(\w+) is not defined$/.exec(message)?.[1]]
    if (name === "ReferenceError" && missing) return `${message}: ${missing}`
    if (name === "SyntaxError" && message.includes("await")) return `${message}: await works only in an async function`
  }

  function start(program) {
    if (typeof program !== "function") throw new TypeError("start takes a function: start(main)")
    if (main) throw new Error("start was called twice")
    main = program
  }

  const console = { log: print, info: print, warn: print, error: print, debug: print }
  // Programs of AICI call it; the functions of this SDK log nothing by themselves.
  function setLogLevel() {}

  const aici = {
    ...{ start, stop, $, fixed, gen, genTokens, select, fork, waitVars, Label, label, backtrack },
    ...{ getVar, setVar, appendVar, tokenize, detokenize, getPrompt, getTokens, eosToken, print },
    ...{ test, assert, AssertionError, checkVar, checkVars, setLogLevel },
  }
  Object.assign(globalThis, aici, { console })

  // AICI's own jsctrl has bytes where there is text here, and its programs call these methods.
  define(String.prototype, "decode", function () {
    return String(this)
  })
  define(String.prototype, "toBuffer", function () {
    return host.toBytes(String(this))
  })
  define(String, "fromBuffer", textOf)
  define(Uint8Array.prototype, "decode", function () {
    return host.fromBytes(this)
  })

  function define(object, name, value) {
    Object.defineProperty(object, name, { value, writable: true, configurable: true })
  }

  const files = filesOf(host.argument)

  return {
    begin(phase, argument) {
      atBegin[phase](argument)
    },

    answer(phase) {
      if (isRunning && !isEnded && !operation) throw new Error("deadlock: the program awaits a promise that nothing resolves")
      return JSON.stringify(atEnd[phase]())
    },

    main: () => Object.keys(files)[0],
    resolve,
    source,
    describe,
  }
})
